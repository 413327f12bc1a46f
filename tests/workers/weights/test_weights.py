"""Every format gives the same weights, and a weight that cannot be read gives an error of one line."""

import json
import re
import shutil
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from safetensors.torch import load_file, save_file

from actorserve.core.messages import StepPlan
from actorserve.errors import ModelError
from actorserve.model_files.describe import describe
from actorserve.model_files.description import ModelDescription, TensorSpec
from actorserve.model_files.gguf_reader import read_gguf
from tests.workers.small_models import ARCHITECTURES, save_model, write_gguf
from workers.engine_options import EngineOptions
from workers.engines.torch_engine import TorchEngine
from workers.kernels.choose import Kernels
from workers.kernels.numerics import numerics
from workers.models.build import load_model
from workers.weights.file_digest import weights_digest
from workers.weights.sources import DummySource, GgufSource
from workers.weights.store import FromFiles

PLAN = StepPlan(0, ("a",), (0,), (tuple(range(40, 140)),), (tuple(range(7)),), (True,))
CPU = torch.device("cpu")
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 1e4,
}


def logits_of(path: Path) -> torch.Tensor:
    return TorchEngine(describe(path), EngineOptions(dtype="float32", kv_cache_bytes=2**20)).logits(PLAN)


def load_described(description: ModelDescription) -> None:
    kernels = Kernels(numerics("float32", CPU), CPU, native=False)
    load_model(description, 64, kernels, FromFiles(description), lambda _: None)


def load(path: Path) -> None:
    load_described(describe(path))


@pytest.fixture
def small(make_model: Any) -> Any:
    return make_model(attention_bias=True, mlp_bias=True)


def test_sharded_files_are_one_model(make_model: Any) -> None:
    """A folder with an index and several safetensors files is read to the same bits as a single file."""
    shards = make_model(max_shard_size="40KB")
    assert len(list(shards.folder.glob("*.safetensors"))) > 1
    assert torch.equal(logits_of(shards.folder), logits_of(make_model().folder))


def test_gguf_and_folder_are_one_model(tmp_path: Path) -> None:
    """The same weights give the same bits from a GGUF file, which orders heads differently, and from a folder."""
    save_model(tmp_path, "llama", rms_norm_eps=2**-20, attention_bias=True)
    path = write_gguf(tmp_path, tmp_path / "small.gguf")
    assert torch.equal(logits_of(path), logits_of(tmp_path))


def test_gguf_rope_factors_are_llama3s_scaling(tmp_path: Path) -> None:
    """A GGUF file's RoPE factors give the angles of the folder's llama3 scaling, up to rounding."""
    model = save_model(tmp_path, "llama", rope_parameters=LLAMA3)
    plain = 1.0 / 1e4 ** (torch.arange(0, 32, 2) / 32)
    factors = {"rope_freqs.weight": (plain / model.reference.model.rotary_emb.inv_freq).tolist()}
    path = write_gguf(tmp_path, tmp_path / "small.gguf", factors=factors)
    assert (logits_of(path) - logits_of(tmp_path)).abs().max() < 1e-4


KINDS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")


@pytest.mark.parametrize("kind", KINDS)
def test_a_part_of_a_gguf_tensor_is_read(tmp_path: Path, kind: str) -> None:
    """Reading a few rows of a stacked tensor gives the same numbers as the gguf package, for every type."""
    stored_as = GGMLQuantizationType[kind]
    _, bytes_per_block = GGML_QUANT_SIZES[stored_as]
    blocks = 3 * 6 * 512 // GGML_QUANT_SIZES[stored_as][0]
    small_bytes = np.random.default_rng(0).integers(0, 64, blocks * bytes_per_block, np.uint8)  # scales are finite
    path = tmp_path / "one.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_tensor("stack", small_bytes.reshape(3, 6, -1), raw_dtype=stored_as)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with ExitStack() as stack:
        source = GgufSource(path, stack)
        found = source.read(TensorSpec("part", (3, 512), "stack", (3, 6, 512), first_row=2, expert=1))
        with pytest.raises(ModelError, match="stack"):
            source.read(TensorSpec("part", (3, 512), "stack", (3, 6, 256)))
    expected = dequantize(small_bytes, stored_as).reshape(3, 6, 512)[1, 2:5]
    assert torch.equal(found.float(), torch.from_numpy(expected))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight"])
def test_a_nan_or_infinity_is_named(small: Any, value: float, name: str) -> None:
    """One NaN or infinity among a tensor's numbers is refused with the tensor's name, in every type."""
    file = small.folder / "model.safetensors"
    tensors = load_file(file)
    tensors[name].view(-1)[3] = value
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        save_file({key: tensor.to(dtype) for key, tensor in tensors.items()}, file, metadata={"format": "pt"})
        with pytest.raises(ModelError, match=re.escape(f"tensor {name} holds NaN or infinity")):
            load(small.folder)


@pytest.mark.parametrize("scale", [b"\x00\x7c", b"\x00\x7e"])
def test_a_damaged_scale_is_named(tmp_path: Path, scale: bytes) -> None:
    """A quantized block whose scale is infinite or NaN is refused with its tensor's name."""
    save_model(tmp_path, "llama")
    path = write_gguf(tmp_path, tmp_path / "small.gguf", GGMLQuantizationType.Q8_0)
    data = bytearray(path.read_bytes())
    place = read_gguf(path).tensors["blk.1.ffn_down.weight"].offset
    data[place : place + 2] = scale
    path.write_bytes(data)
    with pytest.raises(ModelError, match=r"tensor blk\.1\.ffn_down\.weight holds NaN or infinity"):
        load(path)


def test_large_numbers_are_accepted(small: Any) -> None:
    """Finite weights whose sum overflows float32 are accepted."""
    file = small.folder / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"].fill_(3e38)
    save_file(tensors, file, metadata={"format": "pt"})
    load(small.folder)


@pytest.mark.parametrize("name", ["model.layers.1.mlp.down_proj", "lm_head"])
def test_numbers_too_large_to_be_rotated_are_named(small: Any, name: str) -> None:
    """Weights that overflow when they are rotated for quantization are refused in one line with the tensor's name."""
    file = small.folder / "model.safetensors"
    tensors = load_file(file)
    tensors[f"{name}.weight"][0].fill_(3e38)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=re.escape(f"tensor {name}.weight cannot be held in 8 bits")) as caught:
        TorchEngine(describe(small.folder), EngineOptions(dtype="int8", kv_cache_bytes=2**20))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_dummy_weights_make_any_model(tmp_path: Path, architecture: str) -> None:
    """Random weights for a folder without weights give a decoder with sane logits, the same every time."""
    save_model(tmp_path, architecture)
    (tmp_path / "model.safetensors").unlink()
    engines = [
        TorchEngine(describe(tmp_path, "dummy"), EngineOptions(dtype="float32", kv_cache_bytes=2**21)) for _ in range(2)
    ]
    num_blocks = engines[0].layer_groups.num_groups * len(PLAN.block_tables[0])
    first, again = (engine.logits(replace(PLAN, block_tables=(tuple(range(num_blocks)),))) for engine in engines)
    assert torch.equal(first, again)
    assert 0.1 < first.std() < 10


def test_dummy_weights_have_a_sane_scale() -> None:
    """A dummy linear layer keeps its input's variance, rows differ, and gains lie about one in every storage format."""
    source = DummySource()
    weight = source.read(TensorSpec("a.weight", (3000, 2048), "", ()))
    assert abs(weight.std() * 2048**0.5 - 1) < 0.01
    assert not torch.equal(weight[0], weight[2048])
    assert not torch.equal(weight, source.read(TensorSpec("b.weight", (3000, 2048), "", ())))
    for addend in (0.0, 1.0):
        gains = source.read(TensorSpec("a_norm.weight", (2048,), "", (), addend=addend)) + addend
        assert 0.9 < gains.min() <= gains.max() < 1.1


@pytest.mark.parametrize("share", [0.01, 0.5, 0.999])
def test_a_truncated_gguf_file_is_refused(small: Any, tmp_path: Path, share: float) -> None:
    """A GGUF file that ends early, anywhere, gives an error of one line with its name."""
    path = tmp_path / "small.gguf"
    write_gguf(small.folder, path)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(ModelError, match=r"small\.gguf") as caught:
        load(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.999])
def test_a_truncated_safetensors_file_is_refused(small: Any, share: float) -> None:
    """A safetensors file that ends early gives an error of one line, even if it was whole when described."""
    description = describe(small.folder)
    file = small.folder / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(ModelError, match=r"model\.safetensors") as caught:
        load(small.folder)
    assert "\n" not in str(caught.value)
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        load_described(description)


@pytest.mark.parametrize("late", [False, True])
def test_missing_and_misshapen_tensors_are_named(small: Any, late: bool) -> None:
    """A missing tensor, or one of another shape or type, is named, whether describing or loading the model finds it."""
    description = describe(small.folder)
    file = small.folder / "model.safetensors"
    name = "model.layers.1.mlp.down_proj.weight"
    tensors = load_file(file)
    weight = tensors.pop(name)
    for bad in ({}, {name: weight[:, :-1].contiguous()}):
        save_file(tensors | bad, file, metadata={"format": "pt"})
        with pytest.raises(ModelError, match=r"layers\.1\.mlp\.down_proj"):
            load_described(description if late else describe(small.folder))
    save_file(tensors | {name: weight.to(torch.int32)}, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.down_proj"):
        load(small.folder)


def test_an_unknown_architecture_is_refused(small: Any) -> None:
    """A model of an unknown architecture gives an error of one line that names it."""
    settings = small.folder / "config.json"
    raw = json.loads(settings.read_text()) | {"model_type": "mamba", "architectures": ["MambaForCausalLM"]}
    settings.write_text(json.dumps(raw))
    with pytest.raises(ModelError, match="mamba"):
        load(small.folder)


@pytest.mark.parametrize(
    ("changes", "scaling"),
    [
        ({"rope_theta": 1.0}, {"rope_type": "yarn"}),
        ({}, {"rope_type": "yarn", "beta_fast": -1.0}),
        ({}, {"rope_type": "yarn", "attention_factor": float("inf")}),
        ({"rotary_dim": 2}, {"rope_type": "dynamic"}),
    ],
)
def test_rope_that_cannot_be_computed_is_refused(
    small: Any, changes: dict[str, Any], scaling: dict[str, object]
) -> None:
    """Scaling numbers that divide by zero, or need the logarithm of a negative number, give an error of one line."""
    description = describe(small.folder)
    scaling = {"factor": 2.0, "original_max_position_embeddings": 64} | scaling
    broken = replace(description.config, rope_scaling=scaling, **changes)
    with pytest.raises(ModelError, match="RoPE cannot be computed") as caught:
        load_described(replace(description, config=broken))
    assert "\n" not in str(caught.value)


def test_pickles_are_never_read(small: Any, tmp_path: Path) -> None:
    """A folder that has its weights only as pickles is refused, and the pickles are not opened."""
    for name in ("pytorch_model.bin", "model.pt"):
        shutil.copytree(small.folder, tmp_path / name)
        (tmp_path / name / "model.safetensors").rename(tmp_path / name / name)
        with pytest.raises(ModelError, match="safetensors"):
            load(tmp_path / name)


def test_progress_is_reported(small: Any) -> None:
    """Loading reports growing progress up to 1."""
    told: list[float] = []

    def loading(doing: str, done: float) -> None:
        assert doing == "loading weights"
        told.append(done)

    TorchEngine(describe(small.folder), EngineOptions(kv_cache_bytes=2**20), loading)
    assert told == sorted(told)
    assert told[-1] == 1.0
    assert len(told) > 2


def test_the_digest_follows_every_byte(small: Any) -> None:
    """One changed byte in a weight file changes the digest."""
    description = describe(small.folder)
    before = weights_digest(description)
    assert weights_digest(description) == before
    file = small.folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert weights_digest(description) != before
