"""The laws of operators: known answers, counts of five models, and what follows from the formulas."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headgate.cost.derive.gpus import GPUS, H100, H200, TABLE, UNGRAPHED
from headgate.cost.derive.step import NONE, Corrections, Deployment, all_reduce, gemm, joined, step_seconds
from headgate.cost.derive.transformer import MODELS, model_named
from headgate.cost.model import Chunk
from studies.cards.derived import left_out

MS, US = 1e-3, 1e-6
LLAMA = {1: (50.012455, 904.727), 2: (28.164633, 500.339), 4: (16.832070, 291.650), 8: (11.062512, 177.178)}

# Parameters as published (safetensors totals); norms are what the matrices leave out.
PARAMETERS = {
    "llama-3.1-8b": (8_030_261_248, (2 * 32 + 1) * 4096),
    "llama-3.1-70b": (70_553_706_496, (2 * 80 + 1) * 8192),
    "qwen3-8b": (8_190_735_360, (2 * 36 + 1) * 4096 + 36 * 2 * 128),
    "qwen3-30b-a3b": (30_532_122_624, (2 * 48 + 1) * 2048 + 48 * 2 * 128),
    "mixtral-8x7b": (46_702_792_704, (2 * 32 + 1) * 4096),
}


@pytest.mark.parametrize(
    ("m", "n", "k", "answer"),
    [(1, 6144, 4096, 16.6395), (256, 24576, 4096, 85.9424), (2048, 4096, 12288, 307.6334)],
)
def test_products_of_known_time(m, n, k, answer):
    assert gemm(H200, m, n, k, compute=1.18) / US == pytest.approx(answer, abs=5e-5)


def test_dense_steps_of_known_time():
    at, prompt = Deployment(MODELS["qwen3-8b"], H200), (Chunk(0, 2048),)
    shapes = ((1, 256, ()), (256, 256 * 1024, ()), (0, 0, prompt), (256, 256 * 1024, prompt))
    found = [step_seconds(at, *shape) / MS for shape in shapes]
    assert found == pytest.approx([5.358070, 18.177329, 50.304974, 69.524264], abs=1e-6)


def test_steps_with_experts_of_known_time():
    at = Deployment(MODELS["qwen3-30b-a3b"], H200)
    assert step_seconds(at, 16, 16 * 1024) / MS == pytest.approx(12.756163, abs=1e-6)
    assert step_seconds(at, 0, 0, (Chunk(0, 4096),)) / MS == pytest.approx(68.568694, abs=1e-6)


@pytest.mark.parametrize("tensor", LLAMA)
def test_tensor_parallel_steps_of_known_time(tensor):
    at = Deployment(MODELS["llama-3.1-70b"], H200, tensor)
    found = step_seconds(at, 64, 64 * 2048), step_seconds(at, 0, 0, (Chunk(0, 4096),))
    assert [x / MS for x in found] == pytest.approx(LLAMA[tensor], abs=6e-4)


@pytest.mark.parametrize("name", PARAMETERS)
def test_matrices_add_up_to_the_published_parameters(name):
    total, norms = PARAMETERS[name]
    assert MODELS[name].weights + norms == total


@pytest.mark.parametrize(
    ("name", "kv_bytes"),
    [("llama-3.1-8b", 131_072), ("llama-3.1-70b", 327_680), ("qwen3-8b", 147_456), ("qwen3-30b-a3b", 98_304)],
)
def test_kv_bytes_of_a_token(name, kv_bytes):
    assert MODELS[name].kv_bytes == kv_bytes


def test_widths_need_not_be_the_hidden_size():
    assert MODELS["qwen3-4b"].width == 4096 and MODELS["qwen3-4b"].hidden == 2560


def test_kv_heads_fewer_than_gpus_are_copied():
    few = replace(MODELS["qwen3-30b-a3b"], kv_heads=4)
    assert [Deployment(few, H100, t).kv_heads for t in (1, 2, 4, 8)] == [4, 2, 1, 1]


def test_a_window_bounds_what_is_read():
    near = Deployment(MODELS["gemma-3-27b"], H200)
    full = replace(near, model=replace(near.model, window=0))
    for shape in ((64, 64 * 512, ()), (0, 0, (Chunk(0, 512),))):
        assert step_seconds(near, *shape) == step_seconds(full, *shape)
    for shape in ((64, 64 * 8192, ()), (0, 0, (Chunk(8192, 4096),)), (0, 0, (Chunk(0, 16384),))):
        assert step_seconds(near, *shape) < 0.95 * step_seconds(full, *shape)


def test_whole_experts_read_as_much_and_start_fewer_slices():
    whole = Deployment(MODELS["mixtral-8x7b"], H100, 4, whole_experts=True)
    sliced = replace(whole, whole_experts=False)
    few, many = (0, 0, (Chunk(0, 16),)), (0, 0, (Chunk(0, 4096),))
    for shape in (few, many):
        assert step_seconds(whole, *shape) == pytest.approx(step_seconds(sliced, *shape), rel=0.1)


def test_fp8_halves_the_bytes_of_weights_and_kv():
    at = Deployment(MODELS["llama-3.1-8b"], H100)
    small = replace(at, model=replace(at.model, bytes_per_weight=1, bytes_per_kv=1), fp8=True)
    for shape in ((1, 1000, ()), (128, 128 * 4000, ()), (0, 0, (Chunk(0, 8192),))):
        ratio = step_seconds(small, *shape) / step_seconds(at, *shape)
        assert 0.45 < ratio < 0.85


def test_more_of_anything_takes_longer():
    at = Deployment(MODELS["mixtral-8x22b"], H100, 8, graph=512)
    small = step_seconds(at, 32, 32 * 512, (Chunk(0, 256),))
    for more in (
        (33, 33 * 512, (Chunk(0, 256),)),
        (32, 32 * 1024, (Chunk(0, 256),)),
        (32, 32 * 512, (Chunk(0, 512),)),
        (32, 32 * 512, (Chunk(4096, 256),)),
    ):
        assert step_seconds(at, *more) > small


def test_all_reduce_starts_slower_without_a_graph_and_is_nothing_on_one_gpu():
    assert all_reduce(H100, 1e6, 1) == 0
    slower = all_reduce(H100, 1e6, 4, graphed=False) - all_reduce(H100, 1e6, 4)
    assert slower == pytest.approx(UNGRAPHED - 4.8 * US)


def test_joined_lies_between_the_longer_and_the_sum():
    assert joined(3.0, 4.0, 1) == pytest.approx(7.0)
    assert joined(3.0, 4.0, 2) == pytest.approx(5.0)
    assert joined(3.0, 4.0, 1000) == pytest.approx(4.0)
    assert joined(0.0, 0.0, 2) == 0.0


def test_corrections_make_an_engine_slower_than_its_operators():
    at = Deployment(MODELS["qwen3-8b"], H200)
    plain = step_seconds(at, 64, 64 * 1024, (Chunk(0, 512),), NONE)
    assert step_seconds(at, 64, 64 * 1024, (Chunk(0, 512),), Corrections(compute=1.2)) > plain
    assert step_seconds(at, 64, 64 * 1024, (Chunk(0, 512),), Corrections(mixed=1.5)) > plain
    assert step_seconds(at, 64, 64 * 1024, (), Corrections(mixed=1.5)) == step_seconds(
        at, 64, 64 * 1024, (), NONE
    )


def test_gpus_from_data_sheets_say_so():
    assert all(gpu.origin == "measured" for gpu in TABLE.values())
    assert {gpu.origin for name, gpu in GPUS.items() if name not in TABLE} == {"assumed"}
    assert left_out("h100-sxm").gemm != H100.gemm and left_out("h100-sxm").peak == H100.peak


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ("meta-llama/Llama-3.1-70B-Instruct", "llama-3.1-70b"),
        ("Qwen/Qwen3-30B-A3B", "qwen3-30b-a3b"),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "mixtral-8x7b"),
        ("google/gemma-3-27b-it", "gemma-3-27b"),
        ("Qwen/Qwen3-235B-A22B-Instruct-2507", "qwen3-235b-a22b"),
    ],
)
def test_models_by_the_names_of_their_repositories(asked, name):
    assert model_named(asked)[0] == name
