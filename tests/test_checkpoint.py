"""Checkpoints: every way to be broken is named, and the ranks' slices are the whole."""

import json
import re
import shutil
import struct
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from flashstep.checkpoint import Checkpoint, write_checkpoint
from flashstep.config import ConfigError, ModelConfig
from flashstep.formats import decode_fp8_rows
from flashstep.layout import check_world, engram_offsets, tensor_specs
from flashstep.shards import INDEX_FILE, CheckpointError
from flashstep.tiny import random_checkpoint, random_tensors, small_config

GOLDEN = Path(__file__).parents[2] / "shared" / "golden" / "a"
# Two layers are enough where only files are tampered with.
SLIM = {
    "num_hidden_layers": 2,
    "compress_ratios": [0, 1, 0],
    "kv_source_layer_ids": [1],
    "index_source_layer_ids": [1],
    "candidate_source_layer_id": -1,
    "engram_layer_ids": [1],
    "dspark_target_layer_ids": [1],
    "num_nextn_predict_layers": 1,
    "n_routed_experts": 2,
    "dspark_n_routed_experts": 2,
}


@pytest.fixture(scope="module")
def slim(tmp_path_factory):
    directory = tmp_path_factory.mktemp("slim") / "checkpoint"
    return random_checkpoint(small_config(**SLIM), directory, seed=3, max_shard_bytes=400_000)


@pytest.fixture
def broken(slim, tmp_path):
    """A copy to tamper with."""
    return shutil.copytree(slim, tmp_path / "broken")


def problems_of(directory):
    with pytest.raises(CheckpointError) as raised:
        Checkpoint.open(directory)
    return raised.value.problems


def shard_of(directory, name):
    return directory / json.loads((directory / INDEX_FILE).read_text())["weight_map"][name]


def edit_shard(file, change):
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def edit_index(directory, change):
    index = json.loads((directory / INDEX_FILE).read_text())
    change(index["weight_map"])
    (directory / INDEX_FILE).write_text(json.dumps(index))


def data_offset(file, name):
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        return 8 + length + json.loads(stream.read(length))[name]["data_offsets"][0]


def poke(directory, name, offset, content):
    file = shard_of(directory, name)
    with file.open("r+b") as stream:
        stream.seek(data_offset(file, name) + offset)
        stream.write(content)


def as_bytes(tensor):
    return tensor.contiguous().view(torch.uint8)


# -- opening ----------------------------------------------------------------------------------------------------------


def test_opens_what_was_written(slim):
    checkpoint = Checkpoint.open(slim)
    checkpoint.check_values(engram=True)
    expected = random_tensors(checkpoint.config, seed=3)
    assert len(list(slim.glob("*.safetensors"))) > 3
    for name in checkpoint.names():
        assert torch.equal(as_bytes(checkpoint.tensor(name)), as_bytes(expected[name])), name


@pytest.mark.skipif(not GOLDEN.exists(), reason="the golden checkpoint is not beside the repository")
def test_golden_checkpoint():
    checkpoint = Checkpoint.open(GOLDEN)
    checkpoint.check_values(engram=True)
    assert len(checkpoint.names()) == 1197
    for file in GOLDEN.glob("*.safetensors"):
        for name, tensor in load_file(file).items():
            assert torch.equal(as_bytes(checkpoint.tensor(name)), as_bytes(tensor)), name


def test_single_file_without_index(slim, tmp_path):
    tensors = {name: tensor for file in slim.glob("*.safetensors") for name, tensor in load_file(file).items()}
    shutil.copy(slim / "config.json", tmp_path)
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = Checkpoint.open(tmp_path)
    assert torch.equal(checkpoint.tensor("norm.weight"), tensors["norm.weight"])


def test_unfinished_downloads_are_three_distinct_errors(slim, tmp_path):
    shards = sorted(file.name for file in slim.glob("*.safetensors"))
    messages = []
    for lost in (shards[1], shards[-1], INDEX_FILE):
        copy = shutil.copytree(slim, tmp_path / f"without-{lost}")
        (copy / lost).unlink()
        (problem,) = problems_of(copy)
        assert lost in problem
        assert "download stopped early" in problem
        messages.append(problem)
    assert len(set(messages)) == 3
    for file in copy.glob("*.safetensors"):
        file.unlink()
    assert "holds no weights" in problems_of(copy)[0]


@pytest.mark.parametrize(
    "name",
    ["mtp.0.ffn.shared_experts.w2.weight", "mtp.0.ffn.shared_experts.w1.scale", "layers.1.attn.compressor.norm.weight"],
)
def test_missing_tensor_is_named(broken, name):
    edit_shard(shard_of(broken, name), lambda tensors: tensors.pop(name))
    edit_index(broken, lambda index: index.pop(name))
    (problem,) = problems_of(broken)
    assert problem.startswith(f"{name}: missing")


@pytest.mark.parametrize("name", ["mtp.0.ffn.shared_experts.w4.weight", "layers.2.attn_norm.weight", "visions.x"])
def test_unknown_tensor_is_named(broken, name):
    edit_shard(shard_of(broken, "norm.weight"), lambda tensors: tensors.update({name: torch.zeros(3)}))
    edit_index(broken, lambda index: index.update({name: index["norm.weight"]}))
    assert problems_of(broken) == [f"{name}: not a tensor of this model (F32 [3])"]


def test_image_tensors_are_ignored(broken):
    extra = ("vision.blocks.0.weight", "aligner.w", "image_newline", "layers.0.ffn.gate.bias_vl")
    extra += ("mtp.0.ffn.gate.bias_vl",)
    edit_shard(
        shard_of(broken, "norm.weight"),
        lambda tensors: tensors.update({name: torch.full((3,), float("nan"), dtype=torch.float16) for name in extra}),
    )
    edit_index(broken, lambda index: index.update(dict.fromkeys(extra, index["norm.weight"])))
    checkpoint = Checkpoint.open(broken)
    assert checkpoint.ignored_names == sorted(extra)
    assert not set(extra) & set(checkpoint.names())
    checkpoint.check_values()


def test_all_problems_in_one_error(broken):
    """Shape, dtype, a stale index entry, an unlisted tensor, a duplicate and a stray shard, found together."""
    names = ["norm.weight", "layers.0.attn.attn_sink", "layers.0.attn_norm.weight", "embed.weight"]
    edit_shard(shard_of(broken, names[0]), lambda t: t.update({names[0]: torch.zeros(64, dtype=torch.bfloat16)}))
    edit_shard(shard_of(broken, names[1]), lambda t: t.update({names[1]: t[names[1]].double()}))
    last = sorted(broken.glob("*.safetensors"))[-1].name
    edit_index(broken, lambda index: index.update({names[2]: last, "made.up": last}))
    edit_shard(broken / last, lambda t: t.update({names[3]: torch.zeros(1, dtype=torch.bfloat16)}))
    edit_index(broken, lambda index: index.pop("head.weight"))
    save_file({"x": torch.zeros(1)}, broken / "stray.safetensors")
    problems = problems_of(broken)
    for start in (
        "norm.weight: shape [64], expected [128]",
        "layers.0.attn.attn_sink: dtype F64, expected F32",
        f"layers.0.attn_norm.weight: listed in {last}, which does not hold it",
        f"made.up: listed in {last}, which does not hold it; no shard does",
        "embed.weight: present twice",
        "head.weight: held by",
        "stray.safetensors: in the directory, but not in",
    ):
        assert sum(problem.startswith(start) for problem in problems) == 1, (start, problems)
    assert len(problems) == 7


def test_long_lists_are_cut_in_print_only(broken):
    for file in broken.glob("*.safetensors"):
        edit_shard(file, lambda tensors: tensors.update({name: t[:0].clone() for name, t in tensors.items()}))
    with pytest.raises(CheckpointError) as raised:
        Checkpoint.open(broken)
    problems = raised.value.problems
    assert len(problems) == len(tensor_specs(ModelConfig.from_file(broken)))
    assert f"... and {len(problems) - 40} more" in str(raised.value)
    assert len(str(raised.value).splitlines()) == 42


@pytest.mark.parametrize("keep", [0, 5, 100, -1, -70_000])
def test_truncated_file(broken, keep):
    file = shard_of(broken, "layers.1.engram.embed.weight")
    content = file.read_bytes()
    file.write_bytes(content[:keep])
    problems = problems_of(broken)
    assert all(file.name in problem and "truncated" in problem for problem in problems)
    assert len(problems) >= (2 if keep == -70_000 else 1)


def test_damaged_headers(broken):
    file = shard_of(broken, "norm.weight")
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])

    def rewrite(text):
        file.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])
        return problems_of(broken)

    assert "not valid JSON" in rewrite(b"{")[0]
    assert "not a JSON object" in rewrite(b"[]")[0]
    assert "malformed" in rewrite(json.dumps(header | {"norm.weight": {"dtype": "BF16"}}).encode())[0]
    bad_extent = header["norm.weight"] | {"shape": [127]}
    assert "malformed" in rewrite(json.dumps(header | {"norm.weight": bad_extent}).encode())[0]
    twice = json.dumps(header)[:-1] + ', "norm.weight": ' + json.dumps(header["norm.weight"]) + "}"
    assert any("norm.weight: present twice in the header" in problem for problem in rewrite(twice.encode()))
    file.write_bytes(content + b"\0")
    assert "describes" in problems_of(broken)[0]
    file.write_bytes(content)
    Checkpoint.open(broken)


def test_damaged_index(broken):
    (broken / INDEX_FILE).write_text("{")
    assert "not valid JSON" in problems_of(broken)[0]
    (broken / INDEX_FILE).write_text('{"weight_map": {"norm.weight": "../elsewhere.safetensors"}}')
    assert "expected the name of a safetensors file" in problems_of(broken)[0]
    (broken / INDEX_FILE).write_text('{"weight_map": {"a": "b.safetensors", "a": "c.safetensors"}}')
    assert problems_of(broken) == [f"a: present twice in {INDEX_FILE}"]


# -- values -----------------------------------------------------------------------------------------------------------

BAD_VALUES = [  # name, byte offset of the value, its bytes, what the message says of the place
    ("layers.0.attn.wq_a.scale", 4 + 3, b"\xff", "block row 1, block 3: scale byte 255"),
    ("layers.0.ffn.experts.1.w1.scale", 4 * 5 + 2, b"\xff", "row 5, block 2: scale byte 255"),
    ("layers.1.attn.wkv.weight", 128 * 2 + 40, b"\x7f", "row 2, column 40 (block 1): fp8 code"),
    ("mtp.0.attn.wkv.weight", 127, b"\xff", "row 0, column 127 (block 3): fp8 code"),
    ("norm.weight", 2 * 7, b"\x80\x7f", "row 0, column 7: not a finite"),
    ("layers.0.hc_attn_fn", 4 * 512 + 4, b"\0\0\xc0\xff", "row 1, column 1: not a finite"),
]


@pytest.mark.parametrize(("name", "offset", "content", "place"), BAD_VALUES)
def test_bad_value_is_found_when_read(broken, name, offset, content, place):
    poke(broken, name, offset, content)
    checkpoint = Checkpoint.open(broken)
    with pytest.raises(CheckpointError) as raised:
        checkpoint.tensor(name)
    assert raised.value.problems[0].startswith(f"{name}: {place}")


def test_check_values_names_all_bad_tensors(broken):
    for name, offset, content, _ in BAD_VALUES:
        poke(broken, name, offset, content)
    poke(broken, "layers.1.engram.embed.weight", 33, b"\x7f")
    poke(broken, "head.weight", 0, b"\xc0\x7f" * 50)
    checkpoint = Checkpoint.open(broken)
    seen = []
    with pytest.raises(CheckpointError) as raised:
        checkpoint.check_values(progress=lambda name, done, count: seen.append((name, done, count)))
    named = {problem.split(":")[0] for problem in raised.value.problems}
    assert named == {name for name, *_ in BAD_VALUES} | {"head.weight"}
    assert "head.weight: 34 more such values" in raised.value.problems
    assert [done for _, done, _ in seen] == list(range(1, len(checkpoint.names()) - 1))  # all but table and scales
    with pytest.raises(CheckpointError, match=r"layers.1.engram.embed.weight: row 1, column 1 "):
        checkpoint.check_values(engram=True)


def test_ordinary_extremes_are_accepted(broken):
    poke(broken, "layers.0.attn.wq_a.scale", 0, b"\xfe\x00")
    poke(broken, "layers.0.attn.wq_a.weight", 0, b"\x7e\xfe\x80")
    poke(broken, "layers.0.ffn.experts.0.w1.weight", 0, b"\xff\x7f\x80")
    Checkpoint.open(broken).check_values(engram=True)


# -- slices -----------------------------------------------------------------------------------------------------------


@st.composite
def configs(draw):
    """Random small configurations that divide over 4 ranks."""
    groups = draw(st.sampled_from([4, 8]))
    return small_config(
        **SLIM
        | {
            "vocab_size": draw(st.sampled_from([128, 260])),
            "hidden_size": draw(st.sampled_from([128, 256])),
            "moe_intermediate_size": draw(st.sampled_from([128, 256])),
            "num_attention_heads": groups * draw(st.sampled_from([1, 2])),
            "head_dim": draw(st.sampled_from([32, 64])),
            "o_groups": groups,
            "o_lora_rank": 32,
            "hc_mult": draw(st.sampled_from([2, 4])),
            "engram_max_ngram_size": draw(st.integers(2, 4)),
            "engram_n_heads": draw(st.sampled_from([4, 8])),
            "engram_vocab_size": draw(st.integers(5, 60)),
            "n_routed_experts": draw(st.integers(2, 3)),
        }
    )


@settings(max_examples=4, deadline=None)
@given(configs(), st.integers(0, 2**31))
def test_slices_of_all_ranks_are_the_tensor(raw, seed):
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = Checkpoint.open(random_checkpoint(raw, Path(directory) / "c", seed))
        whole = random_tensors(checkpoint.config, seed)
        for world in (1, 2, 4):
            covered = 0
            for name, spec in checkpoint.specs.items():
                axis = spec.split.axis if spec.split else 0
                rebuilt = torch.full(spec.shape, 0xA5, dtype=torch.uint8)  # poison
                if spec.dtype in ("BF16", "F32"):
                    rebuilt = rebuilt.repeat_interleave(whole[name].element_size(), -1)
                for rank in range(world):
                    part = checkpoint.tensor(name, rank, world)
                    assert tuple(part.shape) == spec.local_shape(rank, world)
                    assert part.nbytes == spec.local_bytes(rank, world)
                    assert part.is_contiguous()
                    start = 0
                    for first, end in spec.ranges(rank, world):
                        piece = as_bytes(part.narrow(axis, start, end - first))
                        width = part.element_size() if axis == part.dim() - 1 else 1
                        rebuilt.narrow(axis, first * width, (end - first) * width).copy_(piece)
                        start += end - first
                assert torch.equal(rebuilt, as_bytes(whole[name])), (name, world)
                pieces = sum(spec.local_bytes(rank, world) for rank in range(world))
                assert pieces == spec.nbytes * (1 if spec.split else world)
                covered += spec.split is not None
            assert covered > 50


def test_what_is_split_and_what_is_replicated():
    """The axis decides which product a rank can do alone: rows of the first matrix of a pair, columns of the second."""
    specs = tensor_specs(ModelConfig.from_dict(small_config()))
    axes = {
        "attn.wq_b.weight": 0,
        "attn.attn_sink": 0,
        "attn.wo_a.weight": 0,
        "attn.wo_b.weight": 1,
        "ffn.experts.7.w1.weight": 0,
        "ffn.experts.7.w2.weight": 1,
        "ffn.experts.7.w3.weight": 0,
        "ffn.shared_experts.w1.weight": 0,
        "ffn.shared_experts.w2.weight": 1,
        "ffn.shared_experts.w3.weight": 0,
    }
    expected = {f"{prefix}{name}": axis for prefix in ("layers.3.", "mtp.1.") for name, axis in axes.items()}
    expected |= {"head.weight": 0, "mtp.1.markov_head.head.weight": 0, "mtp.0.main_proj.weight": 1}
    expected |= {"layers.3.engram.embed.weight": 0, "layers.3.engram.wkv.weight": 1}
    for name, axis in expected.items():
        assert specs[name].split.axis == axis, name
    pattern = re.compile(r"(layers|mtp)\.\d+\.")
    split = {pattern.sub("", re.sub(r"experts\.\d+", "experts.7", name)) for name, spec in specs.items() if spec.split}
    weights = {pattern.sub("", name) for name in expected}
    assert split == weights | {
        name.removesuffix("weight") + "scale"
        for name in weights
        if name.removesuffix("weight") + "scale" in {pattern.sub("", n) for n in specs}
    }


@settings(max_examples=10, deadline=None)
@given(configs())
def test_split_axes_agree_between_weight_and_scale(raw):
    specs = tensor_specs(ModelConfig.from_dict(raw))
    checked = 0
    for name, spec in specs.items():
        scale = specs.get(name.removesuffix("weight") + "scale")
        if not name.endswith(".weight") or scale is None or spec.split is None:
            continue
        assert scale.split.axis == spec.split.axis
        for rank in range(4):
            for part, blocks in zip(spec.ranges(rank, 4), scale.ranges(rank, 4), strict=True):
                ratio = spec.shape[spec.split.axis] // scale.shape[spec.split.axis]
                assert part == (blocks[0] * ratio, blocks[1] * ratio), name
                checked += 1
    assert checked > 50


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_share_engram_rows_by_head(slim, world):
    """A rank's row number and offsets lead to the row that the whole table has for the same hash and head."""
    checkpoint = Checkpoint.open(slim)
    config = checkpoint.config
    sizes = config.engram_primes[0]
    whole = checkpoint.engram_table(1)
    assert [offset for heads in whole.offsets for offset in heads][1] == sizes[0][0]
    all_codes, all_scales = whole.load()
    heads = config.engram_n_heads // world
    for rank in range(world):
        table = checkpoint.engram_table(1, rank, world)
        loaded = table.load()
        for size in range(config.engram_max_ngram_size - 1):
            for head in range(heads):
                prime = sizes[size][rank * heads + head]
                hashes = torch.tensor([[0, 1, prime // 2, prime - 1]])
                codes, scales = table.rows(hashes + table.offsets[size][head])
                expected = (hashes + whole.offsets[size][rank * heads + head])[0]
                assert torch.equal(as_bytes(codes)[0], as_bytes(all_codes)[expected])
                assert torch.equal(as_bytes(scales)[0], as_bytes(all_scales)[expected])
                local = (hashes + table.offsets[size][head])[0]
                assert torch.equal(as_bytes(loaded[0])[local], as_bytes(codes)[0])
        columns = checkpoint.tensor("layers.1.engram.wkv.weight", rank, world).shape[1]
        assert columns == config.engram_columns * config.engram_head_dim // world
    assert sum(checkpoint.engram_table(1, rank, world).num_rows for rank in range(world)) == whole.num_rows


def test_engram_wkv_columns_follow_the_heads(slim):
    checkpoint = Checkpoint.open(slim)
    config, whole = checkpoint.config, checkpoint.tensor("layers.1.engram.wkv.weight").float()
    by_head = whole.unflatten(1, (config.engram_max_ngram_size - 1, config.engram_n_heads, config.engram_head_dim))
    part = checkpoint.tensor("layers.1.engram.wkv.weight", 1, 2).float()
    assert torch.equal(part, by_head[:, :, config.engram_n_heads // 2 :].flatten(1))


def test_engram_rows(slim, broken):
    checkpoint = Checkpoint.open(slim)
    table = checkpoint.engram_table(1)
    codes, scales = table.rows(torch.tensor([[3, 3], [table.num_rows - 1, 0]]))
    assert codes.shape == (2, 2, table.head_dim)
    assert scales.shape == (2, 2, table.head_dim // 32)
    assert torch.equal(as_bytes(codes[0, 0]), as_bytes(codes[0, 1]))
    gathered = checkpoint.engram_gather(1)(torch.tensor([[3]]))
    assert torch.equal(gathered, decode_fp8_rows(codes[:1, :1], scales[:1, :1]))
    for row in (-1, table.num_rows):
        with pytest.raises(IndexError, match=rf"row {row} asked for, the table has rows 0..{table.num_rows - 1}"):
            table.rows(torch.tensor([0, row]))
    with pytest.raises(ValueError, match="layer 0 carries no Engram"):
        checkpoint.engram_table(0)
    poke(broken, "layers.1.engram.embed.scale", 9, b"\xff")
    damaged = Checkpoint.open(broken).engram_table(1)
    damaged.rows(torch.tensor([8, 10]))
    with pytest.raises(CheckpointError, match=r"embed.scale: row 9, block 0"):
        damaged.rows(torch.tensor([8, 9]))


def test_loaded_tables_and_views_never_reach_the_file(slim):
    before = {file: file.read_bytes() for file in slim.iterdir()}
    checkpoint = Checkpoint.open(slim)
    checkpoint.tensor("norm.weight").zero_()
    as_bytes(checkpoint.engram_table(1).load()[0]).zero_()
    assert all(file.read_bytes() == content for file, content in before.items())
    assert int(as_bytes(checkpoint.engram_table(1).rows(torch.tensor([0]))[0]).max()) > 0


def test_offsets_are_running_sums_inside_the_rank():
    config = ModelConfig.from_dict(small_config())
    sizes = config.engram_primes[1]
    flat = [prime for heads in sizes for prime in heads[2:4]]
    offsets = [offset for heads in engram_offsets(config, 3, rank=1, world=2) for offset in heads]
    assert offsets == [sum(flat[:i]) for i in range(len(flat))]


def test_check_world_lists_every_size():
    config = ModelConfig.from_dict(small_config())
    for world in (1, 2, 4):
        check_world(config, world)
    with pytest.raises(ConfigError) as raised:
        check_world(config, 3)
    text = str(raised.value)
    keys = ("num_attention_heads", "o_groups", "o_lora_rank", "moe_intermediate_size", "vocab_size", "engram_n_heads")
    assert all(f"{key} =" in text for key in keys)
    # Divisible by 8, but not into whole 32-column blocks: 128 / 8 = 16.
    with pytest.raises(ConfigError) as raised:
        check_world(config, 8)
    assert any("moe_intermediate_size = 128: expected a multiple of 256" in p for p in raised.value.problems)
    with pytest.raises(ConfigError):
        check_world(config, 0)


def test_slices_of_an_unfit_world_are_refused(slim):
    checkpoint = Checkpoint.open(slim)
    with pytest.raises(ConfigError, match="over 3 ranks"):
        checkpoint.tensor("head.weight", 0, 3)
    with pytest.raises(ConfigError, match="over 3 ranks"):
        checkpoint.engram_table(1, 0, 3)
    with pytest.raises(ValueError, match="rank 2 of 2"):
        checkpoint.tensor("head.weight", 2, 2)


# -- writing ----------------------------------------------------------------------------------------------------------


def test_writer_refuses_what_could_not_be_read(tmp_path):
    raw = small_config(**SLIM)
    tensors = random_tensors(ModelConfig.from_dict(raw))
    tensors.pop("norm.weight")
    tensors["embed.weight"] = tensors["embed.weight"].float()
    tensors["extra"] = torch.zeros(1)
    with pytest.raises(CheckpointError) as raised:
        write_checkpoint(tmp_path / "c", raw, tensors)
    assert [problem.split(":")[0] for problem in raised.value.problems] == ["embed.weight", "norm.weight", "extra"]
    assert list(tmp_path.iterdir()) == []


def test_writer_replaces_only_when_asked(slim, tmp_path):
    raw = json.loads((slim / "config.json").read_text())
    tensors = random_tensors(ModelConfig.from_dict(raw), seed=4)
    write_checkpoint(tmp_path / "c", raw, tensors, files={"tokenizer.json": b"{}"}, max_shard_bytes=10**9)
    assert sorted(file.name for file in (tmp_path / "c").iterdir()) == [
        "config.json",
        "model-00001-of-00001.safetensors",
        INDEX_FILE,
        "tokenizer.json",
    ]
    with pytest.raises(FileExistsError):
        write_checkpoint(tmp_path / "c", raw, tensors)
    write_checkpoint(tmp_path / "c", raw, random_tensors(ModelConfig.from_dict(raw), seed=5), overwrite=True)
    assert [file.name for file in tmp_path.iterdir()] == ["c"]
    assert not (tmp_path / "c" / "tokenizer.json").exists()
    assert not torch.equal(Checkpoint.open(tmp_path / "c").tensor("norm.weight"), tensors["norm.weight"])
    index = json.loads((tmp_path / "c" / INDEX_FILE).read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())


# -- random weights ---------------------------------------------------------------------------------------------------


def test_random_weights_are_not_degenerate():
    config = ModelConfig.from_dict(small_config())
    tensors = random_tensors(config, seed=1)
    assert all(torch.equal(as_bytes(t), as_bytes(tensors[name])) for name, t in random_tensors(config, seed=1).items())
    same = [
        name
        for name, tensor in random_tensors(config, seed=2).items()
        if torch.equal(as_bytes(tensor), as_bytes(tensors[name]))
    ]
    assert same == []
    for name in ("layers.0.attn.wq_a", "layers.2.ffn.experts.3.w2", "mtp.1.attn.wo_b", "layers.3.engram.embed"):
        assert len(tensors[f"{name}.scale"].unique()) >= 3, name
    norm = tensors["layers.4.attn_norm.weight"].float()
    assert 0.05 < float(norm.std()) < 0.2
    assert abs(float(norm.mean()) - 1) < 0.05
    hidden = torch.nn.functional.normalize(torch.randn(64, 128), dim=-1) * 128**0.5
    assert 1 < float((hidden @ tensors["head.weight"].float().T).std()) < 3


@pytest.mark.parametrize(
    "overrides",
    [{}, {"num_nextn_predict_layers": 3, "engram_n_heads": 8}, {"vocab_size": 256, "engram_layer_ids": [2]}, SLIM],
)
def test_small_config_is_valid(overrides):
    config = ModelConfig.from_dict(small_config(**overrides))
    for key, value in overrides.items():
        assert getattr(config, key) == (tuple(value) if isinstance(value, list) else value)
    check_world(config, 4)


def test_small_config_covers_every_role():
    config = ModelConfig.from_dict(small_config())
    assert set(config.compress_ratios) == {0, 1, 2}
    assert any(config.uses_candidates(layer) for layer in range(config.num_hidden_layers))
    roles = " ".join(config.role(layer) for layer in range(config.num_hidden_layers))
    for word in ("window only", "KV source", "index source", "candidate source", "Engram", "draft tap"):
        assert word in roles
    with pytest.raises(TypeError, match="no such key: hidden"):
        small_config(hidden=3)
