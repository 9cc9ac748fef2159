"""Many runs from one YAML file: on the same tokens in the same order, resumable, with tables and curves of all of them.

No torch here: it is needed by the runs, which are processes of their own.

    <output>/configs/NAME.yaml   what a run is started with
    <output>/runs/NAME/          its folder, with log.txt (all it printed) and, after a failure, failure.json
    <output>/runs.csv            one row per run
    <output>/curves.csv          every validation of every run
    <output>/report.md, *.png    tables and curves
"""
