"""Makes data.npz with megatron-core's own classes: `python tests/golden/make_data_golden.py` where it is installed.

The file holds shards as megatron-core writes them, its document, sample and shuffle indices for several epochs and
splits, and its blends. tests/unit/data/test_data_golden.py holds this program against it.
"""

import json
import tempfile
from pathlib import Path

import numpy as np
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

SHARDS = {"small": (300, 40, 1), "wide": (70000, 25, 2), "long": (50000, 12, 3)}  # vocabulary, documents, seed
# One shard: name, split, sequence length, seed, samples per split.
ORDERS = [
    ("small", "9,1", 16, 1234, (10, 0, 0)),  # part of an epoch
    ("small", "80,10,10", 7, 1234, (200, 40, 20)),  # several epochs
    ("wide", "1,1,1", 5, 7, (37, 90, 61)),
    ("long", "100", 33, 42, (77, 0, 0)),
]
# Blend: names, weights, split, sequence length, seed, samples per split.
BLENDS = [
    (["small", "long"], [0.3, 0.7], "90,10,0", 9, 1234, (150, 20, 0)),
    (["small", "long", "small"], [5.0, 1.0, 2.5], "50,25,25", 4, 3, (400, 100, 31)),
    (["small", "long"], None, "80,20,0", 8, 11, (30, 5, 0)),
]


class Tokens:
    """The little that megatron-core asks of a tokenizer here."""

    vocab_size, eod, pad, unique_identifiers = None, 0, -1, {}


def shard_documents(vocab_size: int, documents: int, seed: int) -> list[np.ndarray]:
    rng = np.random.RandomState(seed)
    lengths = rng.randint(1, 30, size=documents)
    lengths[rng.randint(documents)] = 0
    return [rng.randint(0, vocab_size, size=length) for length in lengths]


def write_shard(prefix: str, vocab_size: int, documents: int, seed: int) -> None:
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=DType.optimal_dtype(vocab_size))
    for document in shard_documents(vocab_size, documents, seed):
        builder.add_document(torch.from_numpy(document), [len(document)])
    builder.finalize(f"{prefix}.idx")


def build(folder, names, weights, split, seq_length, seed, samples):
    """megatron-core's train, valid and test datasets of the shards `names` in `folder`."""
    config = GPTDatasetConfig(
        random_seed=seed,
        sequence_length=seq_length,
        blend=([f"{folder}/{name}" for name in names], weights),
        split=split,
        path_to_cache=f"{folder}/cache",
        tokenizer=Tokens(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
    )
    return BlendedMegatronDatasetBuilder(GPTDataset, list(samples), lambda: True, config).build()


def main() -> None:
    arrays = {}
    with tempfile.TemporaryDirectory() as folder:
        torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        for name, (vocab_size, documents, seed) in SHARDS.items():
            write_shard(f"{folder}/{name}", vocab_size, documents, seed)
            for suffix in ("bin", "idx"):
                arrays[f"{name}.{suffix}"] = np.fromfile(f"{folder}/{name}.{suffix}", dtype=np.uint8)
        for number, (name, *rest) in enumerate(ORDERS):
            for split, dataset in enumerate(build(folder, [name], None, *rest)):
                if dataset is not None and rest[-1][split]:
                    for index in ("document_index", "sample_index", "shuffle_index"):
                        arrays[f"order{number}.{split}.{index}"] = np.asarray(getattr(dataset, index))
        for number, case in enumerate(BLENDS):
            for split, dataset in enumerate(build(folder, *case)):
                if dataset is not None:
                    arrays[f"blend{number}.{split}.dataset_index"] = np.asarray(dataset.dataset_index)
                    arrays[f"blend{number}.{split}.sample_index"] = np.asarray(dataset.dataset_sample_index)
                    tokens = [dataset[i]["tokens"][0] for i in range(len(dataset))]
                    arrays[f"blend{number}.{split}.first_tokens"] = torch.stack(tokens).numpy()
        torch.distributed.destroy_process_group()
    cases = json.dumps({"shards": SHARDS, "orders": ORDERS, "blends": BLENDS})
    np.savez_compressed(Path(__file__).with_name("data.npz"), cases=np.array(cases), **arrays)


if __name__ == "__main__":
    main()
