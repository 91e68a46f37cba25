"""Optimizer steps of real ranks: collectives, skipped updates, agreement, and every way to trade memory for time."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from training.config import TrainConfig
from training.optimizer import NonFiniteGradientError, build_optimizer
from training.parallelism import build_mesh, build_sharded_model
from training.step import TrainStep
from training.stopping import StopReason

CPU = torch.device("cpu")
TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "tie_word_embeddings": True,
}


def config(**changes) -> TrainConfig:
    values = {
        "run_name": "t",
        "model": TINY,
        "run_directory": "/none",
        "data": {"path": "/none"},
        "total_steps": 10,
        "seq_len": 16,
        "micro_batch_size": 1,
        "global_batch_size": 4,
        "parallelism": {"param_dtype": "float32"},
        "checkpoint": {"directory": "/none", "interval_steps": 1},
    }
    return TrainConfig.model_validate({**values, **changes})


def build(settings: TrainConfig) -> tuple:
    mesh = build_mesh(settings.parallelism, world_size=dist.get_world_size(), device=CPU)
    model = build_sharded_model(settings, mesh=mesh, device=CPU)
    optimizer = build_optimizer(model, settings.optimizer)
    return model, optimizer, TrainStep(settings, model, optimizer, end_of_document=0)


def load(sample: int) -> torch.Tensor:
    return torch.randint(64, (1, 17), generator=torch.Generator().manual_seed(sample))


def samples(rank: int, step: int = 1) -> list[int]:
    return [100 * step + 2 * micro + rank for micro in range(4 // dist.get_world_size())]


def whole(model) -> list[torch.Tensor]:
    return [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]


def trained(rank: int, settings: TrainConfig, steps: int = 2) -> tuple:
    model, _, run = build(settings)
    results = [run(step, samples(rank, step), load) for step in range(1, steps + 1)]
    return [result.loss for result in results], [parameter.detach().numpy() for parameter in whole(model)]


class CountCollectives(TorchDispatchMode):
    """Counts calls of c10d operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "c10d" in function.namespace:
            self.counts[function._opname.strip("_")] += 1
        return function(*args, **(kwargs or {}))


def counted(rank: int, micro_batches: int) -> Counter:
    *_, run = build(config())
    with CountCollectives() as mode:
        run(1, [rank] * micro_batches, load)
    return mode.counts


def test_accumulated_gradients_are_reduced_once_per_group_of_parameters(run_ranks):
    once, four = run_ranks(counted, 1)[0], run_ranks(counted, 4)[0]

    reductions = [name for name in once if "reduce" in name]
    assert once["reduce_scatter_base"] == 3, once  # two blocks and the root
    assert {name: four[name] for name in reductions} == {name: once[name] for name in reductions}
    assert four["allgather_base"] > once["allgather_base"]  # the counting sees that there are four


EQUIVALENT = {
    "selective": {"activation_checkpointing": "selective"},
    "full": {"activation_checkpointing": "full"},
    "chunked loss": {"loss_chunk_tokens": 5},
    "compiled": {"compile": "aot_eager"},
    "compiled, recomputed": {"compile": "aot_eager", "activation_checkpointing": "selective"},
    "hsdp": {"dp_replicate": 2},
}


def all_trained(rank: int, variants: dict) -> dict:
    return {
        name: trained(rank, config(parallelism={"param_dtype": "float32", **one})) for name, one in variants.items()
    }


def test_what_trades_memory_for_time_changes_no_result(run_ranks):
    results = run_ranks(all_trained, {"plain": {}, **EQUIVALENT})[0]
    losses, parameters = results["plain"]
    for name in EQUIVALENT:
        assert results[name][0] == pytest.approx(losses, rel=1e-5), name
        for found, wanted in zip(results[name][1], parameters, strict=True):
            torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), rtol=1e-3, atol=1e-4, msg=name)


def bf16(rank: int) -> tuple:
    settings = config(parallelism={"param_dtype": "bfloat16", "reduce_dtype": "bfloat16"})
    model, optimizer, run = build(settings)
    seen = []
    model.model.layers[0].register_forward_pre_hook(
        lambda _module, arguments: seen.extend(a.dtype for a in arguments[:3])
    )
    loss = run(1, samples(rank), load).loss
    states = {value.dtype for state in optimizer.state.values() for value in state.values()}
    return (
        seen[:3],
        {p.dtype for p in model.parameters()},
        states,
        loss,
        trained(rank, config())[0][0],
    )


def test_in_bf16_the_master_state_and_the_rotary_tables_stay_fp32(run_ranks):
    seen, parameters, states, loss, exact = run_ranks(bf16)[0]
    assert seen == [torch.bfloat16, torch.float32, torch.float32]  # hidden, cosine, sine
    assert parameters == {torch.float32}
    assert states == {torch.float32}
    assert loss == pytest.approx(exact, rel=1e-2)


def with_a_nan(rank: int) -> tuple:
    model, _, run = build(config(optimizer={"max_skipped_steps": 1}))
    before = whole(model)

    def poisoned(sample: int) -> torch.Tensor:
        tokens = load(sample)
        if rank == 1:  # one rank alone: its embedding gradient becomes NaN
            model.model.embed_tokens.register_full_backward_hook(lambda _m, _i, gradients: None)
            next(iter(model.model.layers)).register_forward_hook(lambda _m, _i, output: output * float("nan"))
        return tokens

    first = run(1, samples(rank), poisoned)
    unchanged = all(torch.equal(a, b) for a, b in zip(before, whole(model), strict=True))
    try:
        run(2, samples(rank, 2), poisoned)
    except NonFiniteGradientError as error:
        return first.skipped, unchanged, run.skipped_steps, str(error)
    return first.skipped, unchanged, run.skipped_steps, "went on"


def test_one_ranks_nan_skips_the_update_on_all_and_too_many_end_the_run(run_ranks):
    for skipped, unchanged, count, text in run_ranks(with_a_nan):
        assert skipped
        assert unchanged
        assert count == 2
        assert text.startswith("step 2: the gradient was not finite 2 times in a row (optimizer.max_skipped_steps 1)")


def recovered(rank: int) -> tuple:
    model, _, run = build(config(optimizer={"max_skipped_steps": 1}))
    hook = model.model.layers[0].register_forward_hook(lambda _m, _i, output: output * float("nan"))
    run(1, samples(rank), load)
    hook.remove()
    result = run(2, samples(rank, 2), load)
    return result.skipped, run.skipped_steps, run.skipped_in_a_row


def test_a_finite_gradient_after_a_skipped_step_trains_on(run_ranks):
    assert run_ranks(recovered) == [(False, 1, 0)] * 2


def stopping(rank: int, wishes: dict) -> object:
    *_, run = build(config())
    return run(1, samples(rank), load, stop=wishes.get(rank)).stop


def test_one_ranks_wish_to_stop_is_every_ranks(run_ranks):
    assert run_ranks(stopping, {1: StopReason.DEADLINE}) == [StopReason.DEADLINE] * 2
    assert run_ranks(stopping, {0: StopReason.SIGTERM, 1: StopReason.DEADLINE}) == [StopReason.SIGTERM] * 2
    assert run_ranks(stopping, {}) == [None] * 2


def decays(rank: int) -> list:
    model, optimizer, _ = build(config())
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [(sorted(names[id(p)] for p in group["params"]), group["weight_decay"]) for group in optimizer.param_groups]


def test_matrices_decay_and_norms_do_not(run_ranks):
    (matrices, decay), (vectors, none) = run_ranks(decays, world_size=1)[0]
    assert (decay, none) == (0.1, 0.0)
    assert all(name.endswith("norm.weight") for name in vectors)
    assert len(vectors) == 2 * 2 + 1
    assert not any("norm" in name for name in matrices)


def clipped(rank: int, limit: float) -> tuple:
    model, optimizer, run = build(config(optimizer={"max_grad_norm": limit}))
    kept: list[torch.Tensor] = []
    optimizer.register_step_pre_hook(lambda *_: kept.extend(p.grad.full_tensor() for p in model.parameters()))
    result = run(1, samples(rank), load)
    return result.grad_norm, torch.cat([gradient.flatten() for gradient in kept]).norm().item()


def test_gradients_are_scaled_down_to_the_global_norm_and_the_norm_before_is_told(run_ranks):
    free, free_after = run_ranks(clipped, 1e9)[0]
    limited, limited_after = run_ranks(clipped, 0.01)[0]
    assert free == pytest.approx(free_after, rel=1e-5)
    assert limited == pytest.approx(free, rel=1e-5)
    assert limited_after == pytest.approx(0.01, rel=1e-3)
