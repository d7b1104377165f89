"""The training of the bundled model: what it reads, how it starts, and that it goes on where it stopped."""

from __future__ import annotations

import json
import random

import pytest
import torch

from training import initial, mixture, tokenizer, train
from wakesight.errors import RequestError
from wakesight.evaluation.suites.closed import tasks as t
from wakesight.evaluation.suites.closed import vocabulary as v

SMALL = {
    "layers": 8,
    "hidden": 64,
    "intermediate": 64,
    "batch": 128,
    "tokens": 10_000,
    "lengths": (64, 96),
    "latest": (0.5,),
}


@pytest.fixture(autouse=True)
def _gradients():
    with torch.enable_grad():
        yield


def training(folder, **settings) -> train.Training:
    return train.Training(folder, train.Settings(**{**SMALL, **settings}))


def same(one: train.Training, other: train.Training) -> bool:
    mine, yours = train.weights(one.model), train.weights(other.model)
    return mine.keys() == yours.keys() and all(torch.equal(mine[name], yours[name]) for name in mine)


# ---- the tokenizer


def test_text_of_every_task_comes_back_word_by_word(tmp_path):
    tokenizer.save(tmp_path, 8192)
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(str(tmp_path))
    for task in t.TASKS:
        item = t.make(task, random.Random(task), 200)
        text = " ".join((*item.instruction, *item.words, *item.asked[0].question))
        ids = loaded(text, add_special_tokens=False).input_ids

        assert ids == [v.IDS[word] for word in text.split()]
        assert loaded.decode(ids) == text


def test_the_chat_template_frames_one_user_turn():
    built = tokenizer.build(8192)
    turn = [{"role": "user", "content": "Remember the text.\n\nask code?"}]
    ids = built.apply_chat_template(turn, add_generation_prompt=True, tokenize=True, return_dict=False)

    words = "<bos> <user> remember the text . ask code ? <assistant>"
    assert [v.WORDS[index] for index in ids] == words.split()


@pytest.mark.parametrize("text", ["an unlisted wordling", "<eos>", "amber é"])
def test_a_word_outside_the_list_is_an_error_and_no_unknown_token(text):
    with pytest.raises(Exception, match="Missing"):
        tokenizer.build(64)(text, add_special_tokens=False, split_special_tokens=True)


# ---- the mixture


@pytest.mark.parametrize("task", mixture.SHARES)
@pytest.mark.parametrize("length", [64, 300])
def test_a_sequence_weighs_its_answers_and_is_as_long_as_asked(task, length):
    for number in range(10):
        found = mixture.sequence(task, random.Random(number), length)

        assert len(found.ids) == len(found.weights) == length
        assert found.weights[0] == 0
        assert all(weight == 0 for index, weight in zip(found.ids, found.weights, strict=True) if index == v.IDS[v.PAD])
        for start, end in found.answers:
            assert 0 < start < end <= length
            assert min(found.weights[start:end]) > max(mixture.BACKGROUND, found.weights[start - 1] - 1)
            if task not in mixture.WARM_UP:
                assert found.ids[end - 1] == v.IDS[v.EOS]


def test_the_first_question_follows_the_context_directly_and_the_others_are_turns():
    found = mixture.sequence("closed_dense", random.Random(0), 256, share=0.5)
    words = [v.WORDS[index] for index in found.ids]

    assert words[:2] == [v.BOS, v.USER]
    assert words[found.context] == "ask"
    assert len(found.answers) > 2
    for _, end in found.answers[:-1]:
        assert words[end : end + 2] == [v.USER, "ask"]


@pytest.mark.parametrize("task", [task for task in t.TASKS])
def test_no_question_is_asked_twice(task):
    for number in range(10):
        asked = t.make(task, random.Random(number), 400).asked

        assert len({(each.question, each.prefix) for each in asked}) == len(asked) > 0


def test_few_answers_in_a_long_context_are_not_drowned():
    found = mixture.sequence("closed_single", random.Random(1), 1024)
    start, end = found.answers[0]

    assert sum(found.weights[start:end]) > 0.1 * (sum(found.weights) - sum(found.weights[start:end]))


def test_the_same_random_stream_gives_the_same_batch():
    one, other = (mixture.Mixture().batch(random.Random(3), 1024, 128) for _ in range(2))

    assert torch.equal(one.ids, other.ids)
    assert torch.equal(one.weights, other.weights)
    assert torch.equal(one.scale, other.scale)
    assert not torch.equal(one.ids, mixture.Mixture().batch(random.Random(4), 1024, 128).ids)


def test_words_of_a_question_weigh_what_is_asked_for_and_change_nothing_else():
    plain, heavy = (
        mixture.sequence("closed_dense", random.Random(5), 256, share=0.5, question=weight)
        for weight in (mixture.BACKGROUND, 0.3)
    )
    assert plain.ids == heavy.ids
    assert plain.answers == heavy.answers
    ask, end = v.IDS["ask"], v.IDS["?"]
    asked = [
        range(at, heavy.ids.index(end, at) + 1)
        for at in range(heavy.context, len(heavy.ids))
        if heavy.ids[at] == ask and at < heavy.answers[-1][0]
    ]
    assert len(asked) > 1
    inside = {place for places in asked for place in places}
    assert all((weight == 0.3) == (place in inside) for place, weight in enumerate(heavy.weights))


# ---- the start


def test_every_word_is_named_by_its_groups_together_and_by_no_layer_alone():
    part = initial.roles(initial.Shape())

    assert len({tuple(groups) for groups in part.groups.T.tolist()}) == v.SIZE
    for groups in part.groups:
        assert len(set(groups.tolist())) < v.SIZE / 4


def test_constraints_hold_at_the_start_and_bring_weights_back():
    shape = initial.Shape(hidden=64, intermediate=64)
    model, part = initial.model(shape, 0), initial.roles(shape)
    before = {name: value.clone() for name, value in train.weights(model).items()}
    initial.constrain(model, part)
    for name, value in train.weights(model).items():
        torch.testing.assert_close(value, before[name])

    with torch.no_grad():
        for weight in model.parameters():
            weight += torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    initial.constrain(model, part)
    embedding = model.model.embed_tokens.weight
    mlps = [layer.mlp for layer in model.model.layers]
    assert mlps[2].up_proj.weight[:, slice(*part.blocks[0])].abs().max() > 0
    assert all(mlp.up_proj.weight[:, slice(*part.blocks[0])].abs().max() == 0 for mlp in mlps[3:])
    assert model.model.layers[4].linear_attn.in_proj_qkv.weight[:, slice(*part.blocks[0])].abs().max() == 0
    assert model.model.layers[7].self_attn.v_proj.weight[:, slice(*part.blocks[0])].abs().max() == 0
    assert model.model.layers[7].self_attn.v_proj.weight[:, slice(*part.blocks[1])].abs().max() > 0
    for layer, groups, (first, last) in zip(initial.attention_layers(model), part.groups, part.blocks, strict=True):
        outside = torch.ones(shape.hidden, dtype=torch.bool)
        outside[first:last] = False
        assert layer.self_attn.o_proj.weight[outside].abs().max() == 0
        assert layer.self_attn.o_proj.weight[first:last].abs().max() > 0
        for group in groups.unique():
            mine = embedding[groups == group, first:last]
            assert torch.equal(mine, mine[:1].expand_as(mine))


def test_the_start_looks_repeated_words_up_before_any_training():
    """The right next word is among the first five of 512 for most repeated words, and not with attention closed."""
    from training.fast import hidden_states

    model = initial.model(initial.Shape(), 0)
    batch = mixture.batch_of([mixture.sequence("echo", random.Random(i), 96) for i in range(4)])

    def share(scale: float) -> float:
        logits = hidden_states(model, batch.ids, torch.full((4,), scale)) @ model.lm_head.weight.T
        hits = []
        for row, sequence in enumerate(batch.sequences):
            for start, _ in sequence.answers:
                scores = logits[row, start - 1].clone()
                scores[
                    batch.ids[row, start - 1]
                ] = -torch.inf  # the tied head starts with a liking for the current word
                hits.append(int((scores > scores[batch.ids[row, start]]).sum()) < 5)
        return sum(hits) / len(hits)

    assert share(1.0) > 0.7
    assert share(0.0) < 0.2


# ---- the trainer


def test_a_killed_training_goes_on_to_the_same_weights(tmp_path):
    whole = training(tmp_path / "whole")
    train.run(whole, stop=4)
    train.run(training(tmp_path / "parts"), stop=2)
    lost = training(tmp_path / "parts")
    lost.step()  # killed before it was saved
    resumed = training(tmp_path / "parts")
    assert resumed.counters.step == 2
    train.run(resumed, stop=2)

    assert resumed.counters.step == whole.counters.step == 4
    assert resumed.counters.hits == whole.counters.hits
    assert same(resumed, whole)
    assert same(training(tmp_path / "parts"), whole)


def test_a_kill_between_the_renames_loses_nothing(tmp_path):
    train.run(training(tmp_path), stop=1)
    (tmp_path / "state").rename(tmp_path / "state.old")

    assert training(tmp_path).counters.step == 1


def test_seeds_differ_from_the_first_weight_on(tmp_path):
    assert same(training(tmp_path / "a"), training(tmp_path / "b"))
    assert not same(training(tmp_path / "a"), training(tmp_path / "c", seed=1))


def test_training_lowers_the_loss_of_sequences_it_has_not_seen(tmp_path):
    short = training(tmp_path, layers=12, batch=1024, warm_up=5)
    unseen = mixture.Mixture().batch(random.Random("unseen"), 2048, 64)

    def loss() -> float:
        return train.loss(short.model, unseen.ids, unseen.weights)[0].item()

    before = loss()
    for _ in range(10):
        short.step()
    assert loss() < before - 0.3


def test_stages_follow_accuracy_and_in_the_end_the_clock(tmp_path):
    quick = training(tmp_path / "a", stage_tokens=0)
    for task in train.GATES:
        quick.counters.hits[task], quick.counters.answers[task] = 0.99, 1000
    quick.step()
    assert quick.counters.stage == 1

    slow = training(tmp_path / "b")
    slow.counters.tokens = 5001
    slow.step()
    assert slow.counters.stage == 1


def test_rates_warm_up_and_fall_at_the_end(tmp_path):
    short = training(tmp_path, warm_up=2)
    rates = []
    for tokens in (0, 3000, 8500, 9999):
        short.counters.tokens = tokens
        short.step()
        rates.append([group["lr"] for optimiser in short.optimisers for group in optimiser.param_groups])
    base = short.settings.rate

    assert rates[0] == pytest.approx([base / 2, base / 2, base / 20, base / 2])
    assert rates[1] == pytest.approx([base, base, base / 10, base])
    assert rates[2][0] == pytest.approx(base / 2)
    assert rates[3][0] == pytest.approx(base * 0.03)


@pytest.mark.parametrize(
    ("settings", "wrong"),
    [({"tokens": 0}, "give --minutes or --tokens"), ({"latest": ()}, "one less than lengths")],
)
def test_settings_without_sense_are_refused(tmp_path, settings, wrong):
    with pytest.raises(RequestError, match=wrong):
        training(tmp_path, **settings)


def test_a_folder_goes_on_only_with_its_own_settings(tmp_path):
    training(tmp_path)
    with pytest.raises(RequestError, match="trained with hidden=64, and now 128"):
        training(tmp_path, hidden=128)
    assert training(tmp_path, tokens=20_000).settings.tokens == 20_000  # the end may move


def test_a_folder_of_an_older_version_goes_on(tmp_path):
    """Its settings lack what has been added since, and so it was trained with the default."""
    train.Training(tmp_path, train.Settings(**SMALL))
    older = json.loads((tmp_path / "settings.json").read_text())
    del older["question"]
    (tmp_path / "settings.json").write_text(json.dumps(older))
    with pytest.raises(RequestError, match=r"trained with question=0\.1, and now 0\.3"):
        train.Training(tmp_path, train.Settings(**SMALL, question=0.3))
    train.Training(tmp_path, train.Settings(**SMALL))


def test_the_log_has_a_line_of_json_per_interval(tmp_path, capsys):
    train.run(training(tmp_path), log_every=0.0, stop=2)
    start, *lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]

    assert start["started"]["hidden"] == 64
    assert [line["step"] for line in lines] == [1, 2]
    assert lines[1]["tokens"] == 256
    assert "loss" in capsys.readouterr().out
