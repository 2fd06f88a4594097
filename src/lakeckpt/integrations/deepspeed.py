"""This module saves a DeepSpeed engine, ZeRO stage 0 to 3, and its reader in one cut: `LakeCheckpoint`.

With ZeRO, each rank holds a partition of the weights in full precision and of the optimizer's states: of each group of
parameters (stages 1 and 2), or of each parameter (stage 3). The state of an engine has each partition as a part of a
whole tensor, a DTensor without the padding that DeepSpeed adds. The size of the whole depends on the parameters alone,
so that a checkpoint is restored on any number of ranks: each rank reads the parts that overlap its own.

The state is read from the fields of DeepSpeed's optimizers, which its own checkpoints hold, too. No function of this
module communicates with other ranks, and the module starts no threads.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from os import PathLike
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from lakeckpt.checkpoint.manager import CheckpointManager
from lakeckpt.data.loader.loader import LakeLoader
from lakeckpt.errors import ConfigError
from lakeckpt.integrations.common import Framework
from lakeckpt.lake.storage.base import Storage

_DEEPSPEED = Framework(distribution="deepspeed", oldest="0.19.8", newest="0.19.8")
with _DEEPSPEED.imports():
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

__all__ = ["LakeCheckpoint"]

_ENGINE = (
    "_config.zero_config.round_robin_gradients",
    "_config.zero_config.zero_hpz_partition_size",
    "zero_optimization()",
    "zero_optimization_stage()",
    "random_ltd_enabled()",
)
_GROUPS = ("real_dp_process_group", "nccl_start_alignment_factor")
_SEAMS: Mapping[Any, tuple[str, ...]] = {
    DeepSpeedZeroOptimizer: ("single_partition_of_fp32_groups", "bit16_groups", *_GROUPS),
    BF16_Optimizer: ("fp32_groups_flat_partition", "bf16_groups", *_GROUPS),
    DeepSpeedZeroOptimizer_Stage3: ("fp32_partitioned_groups_flat", "fp16_groups", "sub_group_to_group_id"),
}
"""The fields of DeepSpeed's optimizers that are used: first, the tensors of this rank's partitions of the weights."""
_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
"""The fields of a loss scaler that change."""
_COUNTERS = ("global_steps", "global_samples", "skipped_steps")


class LakeCheckpoint(CheckpointManager):
    """Checkpoints of a DeepSpeed engine and its loader at ``uri``: a `lakeckpt.CheckpointManager`.

    Args:
        uri: where the run lies.
        engine: what ``deepspeed.initialize`` returned first.
        loader: the `lakeckpt.LakeLoader` that the loop iterates.
        state: more objects of the state by name, as for `lakeckpt.CheckpointManager`.
        options: ``persist_every``, ``keep`` and all other arguments of `lakeckpt.CheckpointManager`.

    The run holds the weights, the optimizer's states and options, the learning rate scheduler, the loss scale and the
    counters of the engine. Call `step` after each ``engine.step()``. ConfigError for an engine with pipeline, tensor or
    expert parallelism, states on NVMe or another optimizer than those of ZeRO.
    """

    def __init__(
        self,
        uri: str | PathLike[str] | Storage,
        engine: DeepSpeedEngine,
        loader: LakeLoader,
        state: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        _check(engine)
        if not isinstance(loader, LakeLoader):
            raise ConfigError(f"give the lakeckpt.LakeLoader that the loop iterates, got a {type(loader).__name__}")
        self._engine, self._counted = engine, 0
        super().__init__(uri, {**_objects(engine), "reader": loader, **(state or {})}, **options)

    def restore(self, *arguments: Any, **options: Any) -> int:
        """See `lakeckpt.CheckpointManager.restore`: call it once, before the first step of the engine."""
        done = super().restore(*arguments, **options)
        self._counted = self._engine.global_steps
        return done

    def step(self, batch: Any = None, *, metric: float | None = None) -> None:
        """Call this on every rank after each ``engine.step()``, with the batch that ``engine.backward`` had.

        It counts an optimizer step, and saves if the policy says so, if the engine has stepped the optimizer. In the
        middle of gradient accumulation it does nothing. See `lakeckpt.CheckpointManager.step`.
        """
        new = self._engine.global_steps - self._counted
        if new > 1:
            raise ConfigError(f"the engine has done {new} steps since step() was called: call it after each of them")
        if new:
            self._counted += 1
            super().step(batch, metric=metric)


def _check(engine: DeepSpeedEngine) -> None:
    """Raise ConfigError if ``engine`` holds a state that this module does not know."""
    if type(engine) is not DeepSpeedEngine:
        raise ConfigError(f"give the engine that deepspeed.initialize returned first, got a {type(engine).__name__}")
    _DEEPSPEED.check(engine, *_ENGINE, *_COUNTERS, "has_moe_layers", "mp_world_size", "lr_scheduler")
    _DEEPSPEED.check(engine.optimizer, *_SEAMS.get(type(engine.optimizer), ()))
    zero, config = engine.optimizer, engine._config.zero_config
    refused = {
        f"the optimizer {type(zero).__name__}": engine.zero_optimization() and _masters(zero) is None,
        "mixed precision without ZeRO": not engine.zero_optimization() and hasattr(zero, "optimizer"),
        "experts": engine.has_moe_layers,
        "tensor parallelism": engine.mp_world_size != 1,
        "round_robin_gradients": config.round_robin_gradients and engine.zero_optimization_stage() < 3,
        "zero_hpz_partition_size": config.zero_hpz_partition_size != 1,
        "states on NVMe": getattr(zero, "swap_optimizer", False) or getattr(zero, "params_in_nvme_and_cpu", False),
        "partial offload": hasattr(zero, "backup_optimizer"),
        "torch_autocast in float16": any(
            getattr(one, name, None) is not None
            for one, name in ((engine, "torch_autocast_z0_gradscaler"), (zero, "torch_autocast_gradscaler"))
        ),
        "random LTD": engine.random_ltd_enabled(),
    }
    for what in (what for what, holds in refused.items() if holds):
        raise ConfigError(
            f"an engine with {what} cannot be saved: its ranks hold states that are not known here. ZeRO stage 1, 2 or "
            "3 over data-parallel ranks can be, in float32, float16 and bfloat16"
        )


def _masters(zero: Any) -> list[torch.Tensor] | None:
    """Return the tensors of this rank's partitions of the weights, one or more for each group; None if unknown."""
    return getattr(zero, _SEAMS[type(zero)][0]) if type(zero) in _SEAMS else None


def _objects(engine: DeepSpeedEngine) -> dict[str, Any]:
    """Return the objects that a manager saves of ``engine``. With stage 3 its module holds no weights between steps."""
    if engine.zero_optimization_stage() == 3:
        return {"engine": _EngineState(engine)}
    plain = {} if engine.zero_optimization() else {"optimizer": engine.optimizer}
    return {"model": engine.module, **plain, "engine": _EngineState(engine)}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """The part that this rank holds of a whole of ``size`` elements, in a flat tensor from ``offset`` on.

    The whole has rows of ``width`` elements, and each rank of ``mesh`` has equally many rows, but for the last ranks.
    """

    name: str
    offset: int
    size: int
    width: int
    mesh: DeviceMesh

    @property
    def shape(self) -> tuple[int, ...]:
        rows = -(-self.size // self.width)
        return (rows, self.width) if self.width > 1 else (rows,)

    @property
    def partition(self) -> int:
        """How many elements each rank has in its flat tensor, with padding."""
        return -(-self.shape[0] // self.mesh.size()) * self.width

    @property
    def span(self) -> tuple[int, int]:
        """Where this rank's elements begin and end in the whole."""
        start, end = (min(at * self.partition, prod(self.shape)) for at in (self._rank, self._rank + 1))
        return start, end

    @property
    def _rank(self) -> int:
        return self.mesh.get_local_rank()

    def part(self, flat: torch.Tensor) -> torch.Tensor:
        """Return this rank's elements, in the memory of ``flat``."""
        start, end = self.span
        return flat.detach().narrow(0, self.offset, end - start)

    def whole(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the whole. This rank has the part that lies in ``flat``."""
        part = self.part(flat)
        # Empty parts of one memory would be taken for tied tensors.
        local = part.view(-1, *self.shape[1:]) if part.numel() else flat.new_empty((0, *self.shape[1:]))
        stride = torch.empty(self.shape, device="meta").stride()
        shape = torch.Size(self.shape)
        return DTensor.from_local(local, self.mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)

    def fill(self, flat: torch.Tensor, saved: torch.Tensor) -> None:
        """Copy this rank's elements of ``saved`` into ``flat``."""
        found = saved.to_local().reshape(-1) if isinstance(saved, DTensor) else saved.reshape(-1)[slice(*self.span)]
        self.part(flat).copy_(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Flat:
    """A flat tensor of the optimizer of ``engine``, and what lies in it."""

    tensor: torch.Tensor
    group: int
    pieces: Sequence[_Piece]


class _EngineState:
    """The state of ``engine`` apart from its module. Loading a state of another layout raises ValueError."""

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self.engine = engine
        self.base = getattr(engine.optimizer, "optimizer", engine.optimizer)
        """The torch optimizer."""
        self._names = {id(one): name for name, one in engine.module.named_parameters()}
        self._meshes: dict[tuple[Any, str], DeviceMesh] = {}
        self._flats = list(self._found()) if engine.zero_optimization() else []
        for flat in self._flats:
            held = sum(one.partition for one in flat.pieces)
            if held != flat.tensor.numel():
                raise ConfigError(
                    f"a partition of this DeepSpeed has {flat.tensor.numel()} elements, and its parameters {held}: "
                    "deepspeed==0.19.8 was tested"
                )
        self._frozen = self._found_frozen() if engine.zero_optimization_stage() == 3 else {}

    # --- what lies where

    def _found(self) -> Iterator[_Flat]:
        zero, stage = self.engine.optimizer, self.engine.zero_optimization_stage()
        for at, tensor in enumerate(_masters(zero) or ()):
            if stage == 3:
                pieces = self._pieces_of(zero.fp16_groups[at], tensor.device.type)
                yield _Flat(tensor=tensor, group=zero.sub_group_to_group_id[at], pieces=pieces)
            else:
                yield _Flat(tensor=tensor, group=at, pieces=[self._piece_of_group(at, tensor.device.type)])

    def _piece_of_group(self, at: int, device: str) -> _Piece:
        zero = self.engine.optimizer
        padding = sum(zero.round_robin_bit16_padding[at]) if hasattr(zero, "round_robin_bit16_padding") else 0
        size = sum(one.numel() for one in self._parameters(at)) + padding
        mesh = self._mesh(zero.real_dp_process_group[at], device)
        # DeepSpeed gives each rank an even number of elements.
        return _Piece(name=f"group {at}", offset=0, size=size, width=zero.nccl_start_alignment_factor, mesh=mesh)

    def _pieces_of(self, parameters: Sequence[Any], device: str) -> list[_Piece]:
        pieces, offset = [], 0
        for one in parameters:
            mesh = self._mesh(one.ds_process_group, device)
            pieces.append(_Piece(name=self._names[id(one)], offset=offset, size=one.ds_numel, width=1, mesh=mesh))
            offset += one.ds_tensor.ds_numel
        return pieces

    def _found_frozen(self) -> dict[str, tuple[Any, _Piece]]:
        """Return the parameters that no optimizer has, which are divided all the same."""
        trained = {piece.name for flat in self._flats for piece in flat.pieces}
        found = {}
        for name, one in self.engine.module.named_parameters():
            if name not in trained:
                (piece,) = self._pieces_of([one], one.ds_tensor.device.type)
                found[name] = one, piece
        return found

    def _parameters(self, at: int) -> Sequence[torch.nn.Parameter]:
        zero = self.engine.optimizer
        found: Sequence[torch.nn.Parameter] = (zero.bf16_groups if type(zero) is BF16_Optimizer else zero.bit16_groups)[
            at
        ]
        return found

    def _mesh(self, group: Any, device: str) -> DeviceMesh:
        if (group, device) not in self._meshes:
            self._meshes[group, device] = DeviceMesh.from_group(group, device)
        return self._meshes[group, device]

    # --- the state

    def _layout(self) -> dict[str, Any]:
        """Return what must be the same when a state is loaded."""
        stage = self.engine.zero_optimization_stage()
        parameters = {
            name: list(getattr(one, "ds_shape", one.shape)) for name, one in self.engine.module.named_parameters()
        }
        dtypes = sorted({str(one.dtype) for one in self.engine.module.parameters()})
        return {"ZeRO": "1 or 2" if stage in (1, 2) else str(int(stage)), "dtypes": dtypes, "parameters": parameters}

    def state_dict(self) -> dict[str, Any]:
        engine = self.engine
        scheduler = engine.lr_scheduler
        found = {
            "layout": self._layout(),
            "counters": {name: getattr(engine, name) for name in _COUNTERS},
            "scheduler": None if scheduler is None else scheduler.state_dict(),
            "scale": {name: value for name, value in vars(self._scaler()).items() if name in _SCALE},
        }
        if not self._flats:
            return found
        return {
            **found,
            "options": [
                {key: one for key, one in group.items() if key != "params"} for group in self.base.param_groups
            ],
            "weights": {one.name: one.whole(flat.tensor) for flat in self._flats for one in flat.pieces},
            "states": self._states(),
            "frozen": {name: piece.whole(one.ds_tensor) for name, (one, piece) in self._frozen.items()},
            "buffers": self._buffers() if engine.zero_optimization_stage() == 3 else {},
        }

    def _scaler(self) -> Any:
        return getattr(self.engine.optimizer, "loss_scaler", self)

    def _states(self) -> dict[str, dict[str, Any]]:
        found: defaultdict[str, dict[str, Any]] = defaultdict(dict)
        for flat in self._flats:
            for key, value in (self.base.state.get(flat.tensor) or self._first_state(flat)).items():
                is_flat = isinstance(value, torch.Tensor) and value.shape == flat.tensor.shape
                for one in flat.pieces:
                    found[key][one.name] = one.whole(value) if is_flat else value
        return dict(found)

    def _first_state(self, flat: _Flat) -> dict[str, Any]:
        """Return the state that the optimizer's first step will make, of zeros; nothing if that is not known.

        A state is restored before the first step. Without a tensor in its place, each rank would read the whole."""
        kind, defaults = type(self.base), self.base.defaults
        probe = torch.nn.Parameter(torch.zeros_like(flat.tensor[:1]))
        probe.grad = torch.zeros_like(probe)
        known = inspect.signature(kind).parameters
        try:
            like = kind([probe], **{key: value for key, value in defaults.items() if key in known})
            like.step()
        except Exception:
            return {}
        return {
            key: flat.tensor.new_zeros(flat.tensor.shape, dtype=one.dtype)
            for key, one in like.state[probe].items()
            if isinstance(one, torch.Tensor) and one.shape == probe.shape
        }

    def _buffers(self) -> dict[str, Any]:
        parameters = {name for name, _ in self.engine.module.named_parameters(remove_duplicate=False)}
        return {name: one for name, one in self.engine.module.state_dict().items() if name not in parameters}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._compare(state["layout"])
        for name in _COUNTERS:
            setattr(self.engine, name, state["counters"][name])
        if self.engine.lr_scheduler is not None:
            self.engine.lr_scheduler.load_state_dict(state["scheduler"])
        vars(self._scaler()).update(state["scale"])
        if self._flats:
            self._load_flats(state)
        if self.engine.zero_optimization_stage() == 3:
            self._load_partitioned(state)

    def _compare(self, saved: Mapping[str, Any]) -> None:
        here = self._layout()
        for key in here:
            if saved[key] != here[key]:
                raise ValueError(f"{key}: {saved[key]} in the checkpoint and {here[key]} here")

    def _load_flats(self, state: Mapping[str, Any]) -> None:
        for group, options in zip(self.base.param_groups, state["options"], strict=True):
            group.update(options)
        for flat in self._flats:
            for one in flat.pieces:
                one.fill(flat.tensor, state["weights"][one.name])
            self._load_state(flat, state["states"])

    def _load_state(self, flat: _Flat, states: Mapping[str, Mapping[str, Any]]) -> None:
        live = self.base.state[flat.tensor]
        for key, saved in states.items():
            first = saved[flat.pieces[0].name]
            if not isinstance(first, torch.Tensor) or not first.dim():
                live[key] = first
                continue
            if key not in live:
                live[key] = flat.tensor.new_zeros(flat.tensor.shape, dtype=first.dtype)
            for one in flat.pieces:
                one.fill(live[key], saved[one.name])

    def _load_partitioned(self, state: Mapping[str, Any]) -> None:
        """Bring the module of stage 3 up to date: buffers, and the partitions of each parameter. Parameters that are
        whole on this rank are released, and gathered again when they are used."""
        parameters = dict(self.engine.module.named_parameters())
        for flat in self._flats:
            for one in flat.pieces:
                moved = flat.tensor.narrow(0, one.offset, one.partition)
                parameters[one.name].ds_tensor.copy_(moved)
        for name, (parameter, piece) in self._frozen.items():
            piece.fill(parameter.ds_tensor, state["frozen"][name])
        self.engine.module.load_state_dict(state["buffers"], strict=False)
        every = list(parameters.values())
        every[0].partition(every)
