"""The figures of `flashstep info`: the release's accounting, and sums that must agree with the files."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from flashstep.bytes import (
    KINDS,
    distinct_experts,
    floor_ms,
    rank_memory,
    request_bytes,
    sizes,
    state_read_bytes,
    step_bytes,
)
from flashstep.config import ConfigError, ModelConfig
from flashstep.info import describe, print_info
from flashstep.layout import tensor_specs
from flashstep.shards import CheckpointError
from flashstep.tiny import random_checkpoint, small_config

RELEASED = Path(__file__).parents[2] / "shared" / "spec" / "config.json"


@pytest.fixture(scope="module")
def release():
    if not RELEASED.exists():
        pytest.skip("the released config.json is not beside the repository")
    return ModelConfig.from_file(RELEASED)


@pytest.fixture(scope="module")
def small():
    return ModelConfig.from_dict(small_config())


def printed(path, **options):
    console = Console(file=io.StringIO(), width=160)
    print_info(path, console=console, **options)
    return console.file.getvalue()


# -- the release ------------------------------------------------------------------------------------------------------


def test_release_sizes(release):
    table = sizes(release)
    assert sum(size.nbytes for size in table.values()) == pytest.approx(509.3e9, rel=1e-3)
    # Two tables of fp8 rows of 256 with 8 scale bytes each.
    assert table["Engram tables"].nbytes == (384_006_168 + 384_016_682) * (256 + 8)
    expert = 3 * 2304 * 5120
    assert table["routed experts"].parameters == 40 * 384 * expert
    assert table["routed experts"].nbytes == 40 * 384 * (expert // 2 + expert // 32)
    assert len(tensor_specs(release)) == 95_776


def test_release_memory_of_a_rank(release):
    for world in (1, 2, 4, 8):
        memory = rank_memory(release, world)
        assert memory.experts == 288_777_830_400 // world
        assert memory.engram_tables == pytest.approx(202.76e9 / world, rel=1e-4)
        assert memory.experts < memory.weights < memory.experts * 1.12
    memory = rank_memory(release, 4)
    assert memory.experts == pytest.approx(72.2e9, rel=1e-3)
    assert memory.weights == pytest.approx(78.29e9, rel=1e-3)
    assert (
        sum(rank_memory(release, 4, rank).engram_tables for rank in range(4)) == sizes(release)["Engram tables"].nbytes
    )


def test_release_request(release):
    assert release.context_bytes_per_token == 890
    windows = 43 * (128 + 6) * 528
    groups = 3 * 7 * 2 * 512 * 4
    assert request_bytes(release) == windows + groups + 3 * 4


@pytest.mark.parametrize(("rows", "distinct", "ms"), [(6, 35, 2.2), (48, 203, 9.4), (192, 365, 16.3)])
def test_release_floor(release, rows, distinct, ms):
    """The design's table; its stages are rounded, so a few percent are allowed."""
    assert distinct_experts(384, 6, rows) == pytest.approx(distinct, rel=0.015)
    read = sum(stage.nbytes for stage in step_bytes(release, requests=rows // 6, world=4))
    assert floor_ms(read, 4.6) == pytest.approx(ms, rel=0.02)


def test_release_stages(release):
    stages = {(stage.part, stage.stage): stage for stage in step_bytes(release, world=4)}
    for stage, calls, mb in (
        ("wq_a, wkv", 40, 9.2),
        ("wq_b", 40, 10.5),
        ("wo_a", 40, 8.4),
        ("wo_b", 40, 10.5),
        ("router", 40, 3.9),
        ("gate/up", 40, 116),
        ("down", 40, 58),
        ("mixes", 40, 3.9),
    ):
        found = stages["backbone", stage]
        assert found.calls == calls
        assert found.per_call / 1e6 == pytest.approx(mb, rel=0.02), stage
    parts = {}
    for (part, _), stage in stages.items():
        parts[part] = parts.get(part, 0) + stage.nbytes / 1e9
    assert parts["backbone"] == pytest.approx(8.9, rel=0.01)
    assert parts["head"] == pytest.approx(2 * 0.33, rel=0.01)
    assert parts["draft"] - stages["draft", "Markov head"].nbytes / 1e9 == pytest.approx(0.35, rel=0.1)
    assert stages["draft", "Markov head"].calls == 5
    assert stages["draft", "Markov head"].per_call / 1e6 == pytest.approx(17, rel=0.03)
    assert sum(parts.values()) == pytest.approx(9.9, rel=0.015)


def test_release_caches(release):
    windows = 43 * 128 * 528
    # At 500 tokens everything is read: 18 layers see 250 entries, 20 see 500; eight index sources score them.
    everything = windows + (18 * 250 + 20 * 500) * 288 + (3 * 250 + 5 * 500) * 68
    assert state_read_bytes(release, 500) == everything
    long = [state_read_bytes(release, context) for context in (200_000, 400_000)]
    # Beyond the candidate limit only the three ratio-2 sources and the candidate source read more keys.
    assert long[1] - long[0] == 200_000 * 2.5 * 68


# -- any model --------------------------------------------------------------------------------------------------------


def test_distinct_experts():
    assert distinct_experts(384, 6, 1) == pytest.approx(6)
    assert distinct_experts(16, 16, 3) == 16
    assert distinct_experts(384, 6, 0) == 0
    assert distinct_experts(10, 3, 2) == pytest.approx(10 * (1 - 0.7**2))


def test_sizes_add_up_to_the_files(small, tmp_path):
    directory = random_checkpoint(small_config(), tmp_path / "c")
    held = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    counted = sum(size.nbytes for size in sizes(small).values())
    assert 0 <= held - counted < 0.05 * counted  # headers
    text = printed(directory)
    assert "complete" in text
    assert "656 tensors" in text
    (directory / "model-00001-of-00005.safetensors").unlink()
    with pytest.raises(CheckpointError, match="download stopped early"):
        printed(directory)


def test_memory_and_step_of_one_rank_are_everything(small):
    whole = sum(size.nbytes for size in sizes(small).values())
    memory = rank_memory(small, 1)
    assert memory.weights + memory.engram_tables == whole
    stages = step_bytes(small, requests=10_000)
    # With every expert read: all bytes but looked-up tables, plus the head and the Markov head read more than once.
    specs = tensor_specs(small)
    looked_up = sum(spec.nbytes for name, spec in specs.items() if "embed." in name)
    head, markov, confidence = (
        specs[name].nbytes
        for name in ("head.weight", "mtp.1.markov_head.head.weight", "mtp.1.confidence_head.proj.weight")
    )
    expected = whole - looked_up + head + 4 * (markov + confidence)
    assert sum(stage.nbytes for stage in stages) == pytest.approx(expected)


def test_more_ranks_read_less(small):
    reads = [sum(stage.nbytes for stage in step_bytes(small, world=world)) for world in (1, 2, 4)]
    assert reads[0] > reads[1] > reads[2] > reads[0] / 4
    with pytest.raises(ConfigError):
        step_bytes(small, world=3)


def test_masked_rows_read_no_experts(small):
    by_rows = [
        {(stage.part, stage.stage): stage.nbytes for stage in step_bytes(small, rows=rows)} for rows in (1, 3, 6)
    ]
    down = [stages["backbone", "down"] for stages in by_rows]
    assert down[0] < down[1] < down[2]
    assert len({stages["backbone", "wq_b"] for stages in by_rows}) == 1
    assert len({stages["draft", "down"] for stages in by_rows}) == 1


def test_floor_units():
    assert floor_ms(4.6e9, 4.6) == pytest.approx(1.0)


def test_layer_runs_cover_the_layers(small):
    info = describe(small)
    assert [layer for run in info.layers for layer in range(run.first, run.last + 1)] == list(range(6))
    for run in info.layers:
        for layer in range(run.first, run.last + 1):
            assert run.role == small.role(layer)
            assert (run.kv_source, run.index_source) == (small.kv_source(layer), small.index_source(layer))
    assert set(info.sizes) == set(KINDS)
    assert info.step_world == 4
    assert [memory.world for memory in info.memory] == [1, 2, 4]
    assert list(info.refused_worlds) == [8]
    assert "moe_intermediate_size" in info.refused_worlds[8]
    with pytest.raises(ConfigError):
        describe(small, world=8)


def test_bare_configuration(release):
    text = printed(RELEASED)
    for figure in ("configuration alone", "890.0 bytes per token", "72.19 GB", "202.76 GB", "floor 2.175 ms", "15-19"):
        assert figure in text
    assert "floor 1.251 ms" in printed(RELEASED, tb_s=8.0)
    assert "TP 8" in printed(RELEASED, world=8)
