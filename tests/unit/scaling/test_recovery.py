import numpy as np

from megatron_xmod.scaling.recovery import coverage, paper_grid


def test_the_grid_has_the_papers_109_different_runs():
    assert len(paper_grid()) == len(set(paper_grid())) == 109


def test_intervals_cover_about_as_often_as_they_say():
    """A small look; `python -m megatron_xmod.scaling.recovery` makes the real one with 50 draws."""
    shares = coverage(repetitions=4, bootstraps=0)
    assert 0.6 <= np.mean([shares[name]["profile"] for name in shares]) <= 1.0
    assert shares["rho_A"]["identified"] <= 0.5 and shares["rho_N"]["identified"] == 1
