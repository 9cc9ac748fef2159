"""Trains a model: `deepspeed pretrain_xmod.py --config FILE [--model.routing.K 8 ...]`; also under torchrun and srun.

`python pretrain_xmod.py --help` shows every setting.
"""

from megatron_xmod.config.load import load_config
from megatron_xmod.runtime.entry import run


def main(arguments: list[str]) -> None:
    config = load_config(arguments)  # before the heavy imports: a mistake is told at once

    from megatron_xmod.runtime.distributed import start_distributed

    device = start_distributed(config.train)  # before anything imports deepspeed: it must know the device by then

    from megatron_xmod.data.vocabulary import resolve_vocabulary
    from megatron_xmod.runtime.stop import StopRequest
    from megatron_xmod.train.loop import Trainer

    stop = StopRequest(device)
    Trainer(resolve_vocabulary(config), device).run(stop.agreed)


if __name__ == "__main__":
    run(main)
