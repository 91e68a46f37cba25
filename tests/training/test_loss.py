"""The chunked loss against the whole one: same value, same gradients, a fraction of the memory."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from training.loss import chunked_next_token_loss, next_token_loss, token_losses


def inputs(dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(2, 7, 8, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(31, 8, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(31, (2, 7), generator=generator)
    return hidden, weight, labels


@pytest.mark.parametrize("chunk_tokens", [1, 4, 5, 14, 100])
def test_a_chunked_loss_has_the_value_and_gradients_of_the_whole_one(chunk_tokens):
    hidden, weight, labels = inputs()
    whole = next_token_loss(F.linear(hidden, weight), labels)
    expected = torch.autograd.grad(3 * whole, (hidden, weight))

    chunked = chunked_next_token_loss(hidden, weight, labels, chunk_tokens=chunk_tokens)

    torch.testing.assert_close(chunked, whole)
    for found, wanted in zip(torch.autograd.grad(3 * chunked, (hidden, weight)), expected, strict=True):
        torch.testing.assert_close(found, wanted)


def test_bf16_gradients_of_the_weight_are_summed_in_fp32():
    hidden, weight, labels = inputs(torch.bfloat16)
    whole = next_token_loss(F.linear(hidden.float(), weight.float()), labels)
    expected = torch.autograd.grad(whole, weight)[0]

    found = torch.autograd.grad(chunked_next_token_loss(hidden, weight, labels, chunk_tokens=1), weight)[0]

    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, atol=2e-3, rtol=2e-2)


def test_without_gradients_only_the_loss_is_computed():
    hidden, weight, labels = inputs()
    whole = next_token_loss(F.linear(hidden, weight), labels)
    with torch.no_grad():
        torch.testing.assert_close(chunked_next_token_loss(hidden, weight, labels, chunk_tokens=4), whole)
    per_token = token_losses(hidden.flatten(0, 1), weight, labels.flatten(), 4)
    torch.testing.assert_close(per_token.mean(), whole)
    assert not per_token.requires_grad


PEAK = """
import sys, torch
from training import device as devices
from training.loss import chunked_next_token_loss, next_token_loss
torch.set_num_threads(1)
hidden = torch.randn(1, 1024, 16, requires_grad=True)
weight = torch.randn(32_000, 16, requires_grad=True)
labels = torch.randint(32_000, (1, 1024))
before = devices.memory_peak_bytes(torch.device('cpu'))
if sys.argv[1] == "whole":
    loss = next_token_loss(torch.nn.functional.linear(hidden, weight), labels)
else:
    loss = chunked_next_token_loss(hidden, weight, labels, chunk_tokens=64)
loss.backward()
print(devices.memory_peak_bytes(torch.device('cpu')) - before)
"""


def peak_bytes(kind: str) -> int:
    finished = subprocess.run(
        [sys.executable, "-c", PEAK, kind],
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    return int(finished.stdout)


def test_the_logits_never_stand_whole_in_memory():
    logits = 1024 * 32_000 * 4
    assert peak_bytes("whole") > 2 * logits  # the logits and their gradient: the measurement sees them
    assert peak_bytes("chunked") < 0.9 * logits  # not once: mostly what the allocator keeps
