"""models, methods, doctor, bench, demo and the front door."""

from __future__ import annotations

import json

import pytest

from wakesight.cli.main import COMMANDS, run
from wakesight.testing import tiny


def test_every_command_explains_itself(capsys):
    for name in COMMANDS:
        assert run([name, "--help"]) == 0
        assert "Usage: wakesight" in capsys.readouterr().out
    assert run([]) == 0
    assert "Commands:" in capsys.readouterr().out


def test_an_unknown_command_gets_a_hint(capsys):
    assert run(["asq"]) == 2
    assert "did you mean 'ask'" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["models", "methods", "doctor"])
def test_lists_print_text_and_json(name, capsys):
    assert run([name]) == 0
    assert capsys.readouterr().out.strip()
    assert run([name, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)


def test_methods_lists_what_the_tables_hold(capsys):
    from wakesight.budget.table import ALLOCATIONS
    from wakesight.scores.table import SCORERS

    run(["methods", "--json"])
    listed = json.loads(capsys.readouterr().out)

    assert {row["name"] for row in listed["scorers"]} == set(SCORERS)
    assert {row["name"] for row in listed["allocations"]} == set(ALLOCATIONS)
    assert all(row["about"] for rows in listed.values() for row in rows)


def test_methods_stand_in_one_column(capsys):
    run(["methods"])
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    starts = {len(line) - len(line[2:].partition(" ")[2].lstrip()) for line in rows if line[2] != " "}
    assert starts == {2 + len("expected_attention") + 1}


def test_models_says_what_is_refused_and_what_transformers_lacks(capsys, monkeypatch):
    monkeypatch.setattr("wakesight.models.families.missing_model_types", lambda: frozenset({"kimi_linear"}))
    run(["models"])
    shown = capsys.readouterr().out
    assert shown.count("--keep 1 only: its sparse indexer") == 1
    assert shown.count("the installed transformers does not know kimi_linear") == 1
    run(["models", "--json"])
    families = {row["name"]: row for row in json.loads(capsys.readouterr().out)["families"]}
    assert families["llama"]["only_whole"] is None
    assert "sparse indexer" in families["qwen4_exp"]["only_whole"]
    assert families["kimi_linear"]["missing_model_types"] == ["kimi_linear"]
    assert families["llama"]["missing_model_types"] == []


def test_doctor_names_a_transformers_out_of_range(capsys, monkeypatch):
    from wakesight.engines.hf import compat

    monkeypatch.setattr(compat.transformers, "__version__", "4.57.0")
    assert run(["doctor"]) == 1
    assert "pip install 'transformers>=5.16.1" in capsys.readouterr().out


FAMILIES = [family for family in ("llama", "qwen3_5", "kimi_linear") if family in tiny.FAMILIES]
BENCHES = [(family, kind) for family in FAMILIES for kind in ("decode", "prefill", "sweep", "arms")]


@pytest.mark.parametrize(("family", "kind"), BENCHES)
def test_bench_runs_on_a_tiny_model(family, kind, tmp_path, capsys):
    folder = str(tiny.save(family, tmp_path / family))
    words = ["bench", kind, "--model", folder, "--tokens", "200", "--rounds", "2", "--steps", "2"]

    assert run([*words, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["bench"] == kind
    assert {"torch", "transformers"} <= result["versions"].keys()
    if kind == "decode":
        arms = {row["arm"]: row for row in result["rows"]}
        assert len(arms) == 5
        whole, tenth = arms["ours p=1"]["must_read_bytes"], arms["ours p=0.1"]["must_read_bytes"]
        assert whole == arms["transformers DynamicCache"]["must_read_bytes"] > tenth
    if kind == "arms":
        assert result["same"] == result["sessions"] == 13
    assert run(words) == 0
    assert "versions" not in capsys.readouterr().out


def test_bench_refuses_nonsense(capsys):
    assert run(["bench", "speed"]) == 2
    assert "use one of decode, prefill, sweep" in capsys.readouterr().err


@pytest.mark.real
def test_the_demo_shows_answers_bytes_and_tokens(smollm2, tmp_path, capsys):
    picture = tmp_path / "kept.png"
    assert run(["demo", "--json", "--png", str(picture)]) == 0
    shown = json.loads(capsys.readouterr().out)

    assert [arm["keep"] for arm in shown["arms"]] == [1.0, 0.5, 0.3, 0.1]
    assert shown["tokens"] > 2500
    phone, archive = shown["arms"][0]["answers"]
    assert "5926" in phone
    assert "48213" in archive
    for arm in shown["arms"]:
        kept = sum(map(sum, arm["kept_entries"])) / (90 * shown["tokens"])
        assert arm["kv_bytes_kept"] / arm["kv_bytes_full"] == pytest.approx(kept, rel=0.01)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert list(tmp_path.iterdir()) == [picture]
