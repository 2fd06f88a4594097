"""This module lets torchtitan's Trainer run on processors, with a small model in place of ``llama3_debugmodel``.

torchtitan imports kernels of triton and asks a GPU for its memory: both get stand-ins here, before the Trainer is
imported. As a script, it runs ``torchtitan.train`` on the config registry ``my_configs``, and notes of each step the
tokens that it used and a digest of the weights.
"""

from __future__ import annotations

import hashlib
import sys
import types
from dataclasses import dataclass, replace
from typing import Any

import torch

VOCABULARY = 512


class _Anything:
    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self


class _Kernels(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything()


class _Memory:
    device_name = "processor"

    def get_peak_stats(self) -> Any:
        from torchtitan.components.metrics import DeviceMemStats

        return DeviceMemStats(*[0] * len(DeviceMemStats._fields))

    def reset_peak_stats(self) -> None:
        pass


def prepare() -> None:
    """Put the stand-ins into place. Call it before ``torchtitan.trainer`` is imported."""
    sys.modules["torchtitan.distributed.minimal_async_ep.kernels"] = _Kernels("kernels")
    torch._utils._get_available_device_type = lambda: "cpu"
    import torchtitan.components.metrics
    import torchtitan.distributed.utils

    torchtitan.components.metrics.build_device_memory_monitor = _Memory
    torchtitan.distributed.utils.set_pg_timeouts = lambda **given: None  # its barrier names a GPU
    registry: Any = types.ModuleType("torchtitan.models.llama3.config_registry")
    registry.llama3_debugmodel = small_config
    for name in ("torchtitan.models.llama3", registry.__name__):
        sys.modules[name] = registry


def small_config() -> Any:
    """Return the config of a Trainer for an embedding and a linear layer, with AdamW."""
    from torch.distributed.fsdp import fully_shard
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
    from torchtitan.components.tokenizer import BaseTokenizer
    from torchtitan.config import TrainingConfig
    from torchtitan.models.common import Embedding, Linear
    from torchtitan.protocols import BaseModel
    from torchtitan.protocols.model_spec import ModelSpec
    from torchtitan.trainer import Trainer

    class Small(BaseModel):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseModel.Config):
            def update_from_config(self, *, config: Any, **others: Any) -> None:
                pass

            def get_nparams_and_flops(self, model: Any, seq_len: int) -> tuple[int, int]:
                return sum(one.numel() for one in model.parameters()), 1

        def __init__(self, config: Any) -> None:
            super().__init__()
            init = {"weight": lambda weight: torch.nn.init.normal_(weight, std=0.02)}
            embedding = Embedding.Config(num_embeddings=VOCABULARY, embedding_dim=8, param_init=init)
            self.embedding = embedding.build()
            self.head = Linear.Config(in_features=8, out_features=VOCABULARY, param_init=init).build()

        def forward(self, tokens: Any, positions: Any = None) -> Any:
            return self.head(self.embedding(tokens))

    class Numbers(BaseTokenizer):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseTokenizer.Config):
            pass

        def __init__(self, config: Any, **others: Any) -> None:
            super().__init__()

        def encode(self, text: str, add_bos: bool = False, add_eos: bool = False) -> list[int]:
            return [int(word) for word in text.split()]

        def decode(self, tokens: list[int]) -> str:
            return " ".join(map(str, tokens))

        def get_vocab_size(self) -> int:
            return VOCABULARY

    def parallelize(model: Any, *, parallel_dims: Any, **others: Any) -> Any:
        if parallel_dims.dp_shard_enabled:
            fully_shard(model, mesh=parallel_dims.get_mesh("dp_shard"))
        return model

    return Trainer.Config(
        model_spec=ModelSpec(
            name="small",
            flavor="small",
            model=Small.Config(),
            parallelize_fn=parallelize,
            pipelining_fn=None,
            post_optimizer_build_fn=None,
            state_dict_adapter=None,
        ),
        tokenizer=Numbers.Config(),
        loss=CrossEntropyLoss.Config(),
        optimizer=replace(default_adamw(lr=1e-2), implementation="for-loop"),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2),
        training=TrainingConfig(local_batch_size=2, global_batch_size=4, seq_len=8, steps=16, disable_cuda_graphs=True),
        metrics=MetricsProcessor.Config(log_freq=1),
    )


def weights_of(model: torch.nn.Module) -> str:
    """Return a digest of the weights; collective where they are divided."""
    whole = (getattr(one, "full_tensor", lambda one=one: one)().detach() for one in model.parameters())
    return hashlib.sha1(b"".join(one.numpy().tobytes() for one in whole)).hexdigest()


def note_steps() -> None:
    """Note each step that `LakeCheckpoint` is told of, and each start."""
    from lakeckpt.integrations.torchtitan import LakeCheckpoint, LakeDataLoader
    from tests.frameworks.notes import note

    used: list[int] = []
    inputs_of, save, load = LakeDataLoader.inputs_of, LakeCheckpoint.save, LakeCheckpoint.load

    def noted_inputs(self: Any, batch: Any) -> Any:
        used.extend(batch["tokens"].flatten().tolist())
        return inputs_of(self, batch)

    def noted_save(self: Any, curr_step: int, last_step: bool = False) -> bool:
        note(curr_step, used, weights=weights_of(self._trainer.model_parts[0]))
        used.clear()
        return save(self, curr_step, last_step)

    def noted_load(self: Any, step: int = -1) -> bool:
        found = load(self, step)
        note(0, [], restored=self._trainer.step, weights=weights_of(self._trainer.model_parts[0]))
        return found

    LakeDataLoader.inputs_of, LakeCheckpoint.save, LakeCheckpoint.load = noted_inputs, noted_save, noted_load


if __name__ == "__main__":
    prepare()
    note_steps()
    from torchtitan.train import main

    main()
