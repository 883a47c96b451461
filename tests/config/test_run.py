"""run.toml: every error names the key, the value and what is allowed; the canonical form is one for all sites."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from pier_node.base.errors import PierError
from pier_node.config.presets import PRESETS
from pier_node.config.run import (
    RunConfig,
    config_changes,
    from_canonical,
    load,
)


def read(folder: Path, text: str) -> RunConfig:
    path = folder / "run.toml"
    path.write_text(text)
    return load(path)


STAGES = "[run]\nsites = 2\n[pipeline]\nstages = 2\n"
ERRORS = {
    "[run]\nsites = 8\n[pipeline]\nstages = 6": "pipeline.stages = 6 needs as many blocks: model.layers = 5",
    "[run]\nsites = 3\n[pipeline]\nstages = 4": "pipeline.stages = 4 needs as many sites: run.sites = 3",
    STAGES + '[outer]\nalgorithm = "noloco"\nfinal_merge = true': "outer.final_merge = True is not there",
    STAGES + '[outer]\nstart = "solo"': "no site of a pipeline has the whole model",
    STAGES + '[outer]\ncodec = "topk"': 'outer.codec = "topk" is not there for the stages of a pipeline with',
    STAGES + '[outer]\nalgorithm = "sync"\ncodec = "int8"': 'with algorithm = "sync": use "none"',
    STAGES + '[outer]\ncodec = "int8"\nresidual = "bf16"': "outer.residual = 'bf16' is not there",
    STAGES + '[outer]\nrobust = "trimmed"': "outer.robust = 'trimmed' is not there",
    STAGES + "[outer]\noverlap = true": "outer.overlap = True is not there",
    STAGES + "[outer]\nfragments = 5": "outer.fragments = 5 is not there",
    '[run]\nname = "a b"': "run.name",
    "[run]\nsites = 0": "run.sites = 0: Input should be greater than or equal to 1",
    "[run]\nseed = -1": "run.seed = -1",
    '[model]\npreset = "gpt5"': "preset 'gpt5' is unknown; allowed: llama-tiny",
    '[model]\npreset = "gpt2-xl"\nheads = 7': "dim = 1600 must be a multiple of heads = 7",
    "[model]\nheads = 4\nkv_heads = 3": "heads = 4 must be a multiple of kv_heads = 3",
    '[model]\nform = "gpt2"\nheads = 4\nkv_heads = 2': 'form = "gpt2" has no grouped heads',
    "[model]\ndim = 12\nheads = 4": "must be even for rotary positions",
    '[data]\nsource = "text"': 'source = "text" needs path',
    '[data]\nsource = "csv"': "data.source = \"csv\": Input should be 'stdlib', 'builtin', 'text', 'jsonl'",
    '[data]\nsource = "text"\npath = "a"\n[[data.mixture]]\nweight = 1': "leave source and path out of [data]",
    '[[data.mixture]]\nsource = "text"': 'source = "text" needs path',
    "[[data.mixture]]\nweight = 0": "data.mixture.0.weight = 0: Input should be greater than 0",
    "[[data.mixture]]\nwieght = 1": "data.mixture.0.wieght: no such key; allowed here: source, path",
    "[data]\ndocument_mask = true": 'needs a tokenizer with an end-of-text token, not "bytes"',
    STAGES + '[inner]\nresidual_stream = "bf16"': "inner.residual_stream is not there for the stages",
    STAGES + '[data]\ntokenizer = "t"\ndocument_mask = true': "data.document_mask is not there for the stages",
    "[data]\nvalidation = 0.9": "data.validation = 0.9: Input should be less than or equal to 0.5",
    "[inner]\nlr = -1": "inner.lr = -1: Input should be greater than 0",
    "[inner]\nlr = 1e-5\nmin_lr = 1e-4": "min_lr = 0.0001 must not be above lr = 1e-05",
    "[inner]\nstep = 3": "inner.step: no such key; allowed here: total_steps, batch_size",
    '[outer]\nalgorithm = "dilco"': "outer.algorithm = \"dilco\": Input should be 'pier', 'diloco', 'noloco' or 'sync'",
    '[outer]\nalgorithm = "sync"\nstart = "solo"': "synchronous from the first step to the last",
    '[outer]\nstart = "solo"\nstart_fraction = 0.0': "needs start_fraction > 0",
    '[outer]\nalgorithm = "noloco"\nstart = "sync"': 'start = "sync" needs every site at every step',
    '[outer]\nalgorithm = "noloco"\nschedule = "cosine"': "no momentum_warmup, no schedule",
    '[outer]\nalgorithm = "noloco"\nrobust = "trimmed"': "is for the mean of many sites: noloco meets in pairs",
    "[outer]\nfinal_merge = true": 'final_merge = true is for algorithm = "noloco"',
    "[outer.noloco]\ngamma = 1.5": "gamma = 1.5 must be below 2(1 - alpha²) = 1.5 for alpha = 0.5",
    "[outer.noloco]\nalpha = 0.9": "gamma = 0.7 must be below 2(1 - alpha²) = 0.38 for alpha = 0.9",
    "[outer.noloco]\ngamma = -0.1": "outer.noloco.gamma = -0.1: Input should be greater than or equal to 0",
    "[outer.noloco]\nbeta = -0.1": "outer.noloco.beta = -0.1: Input should be greater than or equal to 0",
    '[outer]\nalgorithm = "noloco"\ninner_steps = 0': "outer.inner_steps = 0",
    "[outer.noloco]\ngroup = 3": "outer.noloco.group: no such key; allowed here: alpha, beta, gamma",
    "[outer]\nmomentum = 1.0": "outer.momentum = 1.0: Input should be less than 1",
    "[run]\npretrained = true\n[program]\nstep_tokens = 8\ntensors = ['weight 2x3']\n[outer]\nstart = 'none'": (
        "run.pretrained is for Pier's own trainer"
    ),
    "[pipeline]\nfull_end = 0.2": "pipeline.full_end is for paths that leave stages out",
    "[pipeline]\nmax_jump = 2": "pipeline.max_jump is for paths that leave stages out",
    "[run]\nsites = 4\n[pipeline]\nstages = 4\nskip = 0.5\nmax_jump = 2": "need jumps of at least 3",
    "[model]\nsubspace = 32\ntie_embeddings = false": "model.subspace is for models in stages",
    "[model]\nsubspace = 128": "subspace = 128 must be less than dim = 128, or 0",
    "[model]\nsubspace = 32": 'subspace is for form = "llama" with tie_embeddings = false',
    "[inner]\nlr = inf": "inner.lr = Infinity: Input should be a finite number",
    '[run]\nwitness = true\n[outer]\nalgorithm = "noloco"': "run.witness is for rounds of all replicas",
    "[run]\nwitness = true\nsites = 2\n[pipeline]\nstages = 2": "run.witness is for rounds of all replicas",
    "[other]\na = 1": "other: no such key; allowed here: run, model, data, inner, outer",
}


@pytest.mark.parametrize("text", ERRORS)
def test_errors_name_key_value_and_what_is_allowed(tmp_path: Path, text: str) -> None:
    with pytest.raises(PierError) as caught:
        read(tmp_path, text)
    assert ERRORS[text] in str(caught.value)
    assert "run.toml" in str(caught.value)


def test_all_errors_are_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(PierError) as caught:
        read(tmp_path, "[run]\nsites = 0\n[inner]\nlr = 0\n[data]\nvalidation = 2")
    assert all(key in str(caught.value) for key in ("run.sites", "inner.lr", "data.validation"))


def test_a_missing_file_and_one_that_is_not_toml(tmp_path: Path) -> None:
    with pytest.raises(PierError, match="pier-node init"):
        load(tmp_path / "none.toml")
    with pytest.raises(PierError, match="not TOML"):
        read(tmp_path, "run = [")


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_are_valid_and_can_be_changed(tmp_path: Path, preset: str) -> None:
    model = read(tmp_path, f'[model]\npreset = "{preset}"\nlayers = 1').model
    assert model.layers == 1
    assert model.dim == PRESETS[preset]["dim"]


def test_an_algorithm_sets_defaults_that_keys_overrule(tmp_path: Path) -> None:
    pier, diloco = read(tmp_path, "").outer, read(tmp_path, '[outer]\nalgorithm = "diloco"').outer
    assert (pier.start, pier.start_fraction, pier.momentum_warmup, pier.schedule) == ("solo", 0.1, True, "staged")
    assert (diloco.start, diloco.momentum_warmup, diloco.schedule) == ("none", False, "constant")
    assert (diloco.momentum, diloco.lr) == (0.9, 0.7)
    mixed = read(
        tmp_path, '[outer]\nalgorithm = "diloco"\nstart = "sync"\nmomentum_warmup = true\nschedule = "cosine"'
    ).outer
    assert (mixed.start, mixed.start_fraction, mixed.momentum_warmup, mixed.schedule) == ("sync", 0.1, True, "cosine")


def test_a_pipeline_averages_at_every_step_unless_it_has_outer_rounds(tmp_path: Path) -> None:
    plain, pier = read(tmp_path, STAGES), read(tmp_path, STAGES + "[outer]\ninner_steps = 10")
    assert plain.outer.algorithm == "sync"
    assert (pier.outer.algorithm, pier.outer.start, pier.outer.start_fraction) == ("pier", "sync", 0.1)
    assert read(tmp_path, STAGES + '[outer]\nstart = "none"').outer.start_fraction == 0.0
    assert read(tmp_path, "[pipeline]\nstages = 1").outer.start == "solo"
    for run in (plain, pier):
        assert from_canonical(run.canonical()) == run


def test_noloco_has_the_defaults_of_its_paper(tmp_path: Path) -> None:
    outer = read(tmp_path, '[outer]\nalgorithm = "noloco"').outer
    assert (outer.noloco.alpha, outer.noloco.beta, outer.noloco.gamma, outer.inner_steps) == (0.5, 0.7, 0.7, 50)
    assert (outer.start, outer.start_fraction, outer.momentum_warmup, outer.schedule) == ("none", 0, False, "constant")
    assert outer.final_merge is False
    solo = read(tmp_path, '[outer]\nalgorithm = "noloco"\nstart = "solo"').outer
    assert solo.start_fraction == 0.1


@pytest.mark.parametrize(
    ("outer", "named"),
    [
        ("momentum = 0.8\nlr = 0.8", {"lr"}),  # the warmup of Pier's start has the momentum
        ('algorithm = "diloco"\nmomentum = 0.8\nlr = 0.8', set()),
        ('algorithm = "diloco"\nstart = "solo"\nmomentum_warmup = true\nschedule = "cosine"\nmomentum = 0.8', set()),
        ('algorithm = "noloco"\nlr = 0.8', {"lr"}),
        ("", set()),
    ],
)
def test_keys_without_effect_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, outer: str, named: set[str]
) -> None:
    read(tmp_path, f"[outer]\n{outer}\n")
    assert {key for key in ("momentum", "lr") if f"outer.{key} has no effect" in caplog.text} == named


def test_without_a_pull_there_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    read(tmp_path, "[outer.noloco]\ngamma = 0")
    assert not caplog.messages
    read(tmp_path, '[outer]\nalgorithm = "noloco"\n[outer.noloco]\ngamma = 0')
    assert "gamma = 0: nothing pulls the sites' anchors together" in caplog.text


def test_the_hash_does_not_depend_on_how_it_was_written(tmp_path: Path) -> None:
    one = read(tmp_path, "[run]\nname = 'x'\nseed = 3\n[inner]\nlr = 0.001")
    other = read(tmp_path, '# comment\n[inner]\nlr = 1e-3\n[run]\nseed = 3\nname = "x"')
    assert one.hash() == other.hash()
    assert one.hash() != read(tmp_path, "[run]\nname = 'x'\nseed = 4").hash()


def test_the_hash_of_the_defaults_is_known() -> None:
    """It changes when a default does: then old and new sites are in different runs, and CHANGELOG.md must say so."""
    assert RunConfig().hash().hex() == "8c8d21137596548c2397e089a9c5d4a0f16bd990cbed2ab0837f55891ce673d1"


@given(
    seed=st.integers(0, 2**63 - 1),
    sites=st.integers(1, 1024),
    steps=st.integers(1, 10**9),
    rate=st.floats(1e-6, 1.0),
    preset=st.sampled_from(sorted(PRESETS)),
)
def test_the_canonical_form_comes_back_the_same(seed: int, sites: int, steps: int, rate: float, preset: str) -> None:
    tables = {
        "run": {"seed": seed, "sites": sites},
        "model": {"preset": preset},
        "inner": {"total_steps": steps, "lr": rate, "min_lr": 0.0},
    }
    config = RunConfig.model_validate(tables)
    assert from_canonical(config.canonical()) == config
    assert from_canonical(config.canonical()).hash() == config.hash()


@pytest.mark.parametrize("text", ["", "[]", "{", '{"run": 3}', '{"future": {}}', '{"model": {"preset": []}}'])
def test_what_a_peer_sent_is_checked(text: str) -> None:
    with pytest.raises(PierError, match="peer's run configuration"):
        from_canonical(text)


@pytest.mark.parametrize(
    ("outer", "problem"),
    [
        ({"inner_steps": 50, "fragments": 3}, "inner_steps = 50 must be a multiple of fragments = 3"),
        ({"algorithm": "sync", "overlap": True}, "no overlap, no fragments"),
        ({"algorithm": "sync", "inner_steps": 4, "fragments": 2}, "no overlap, no fragments"),
        ({"algorithm": "noloco", "fragments": 2}, "pairs of noloco swap the whole model"),
        ({"algorithm": "noloco", "codec": "topk2"}, "is for pseudo-gradients"),
        ({"codec": "int3"}, "int3"),
        ({"fragments": 65}, "64"),
    ],
)
def test_ways_to_send_less_that_do_not_go_together(outer: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        RunConfig.model_validate({"outer": outer})


def test_no_start_takes_no_part_of_the_run() -> None:
    """Else the ramp of the outer learning rate would begin late, and what is learned before be thrown away."""
    taken = [
        RunConfig.model_validate({"outer": {"algorithm": algorithm, "start": start}}).outer.start_fraction
        for algorithm in ("pier", "diloco", "noloco")
        for start in ("none", "solo")
    ]
    assert taken == [0.0, 0.1] * 3


TABLES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.dictionaries(st.sampled_from("abcd"), inner, max_size=3) | st.lists(inner, max_size=2),
)


def test_each_key_with_both_values() -> None:
    before, now = RunConfig(), RunConfig.model_validate({"run": {"name": "other"}, "inner": {"total_steps": 9}})
    said = config_changes(before.canonical(), now.canonical())
    assert f"inner.total_steps was {before.inner.total_steps}, is 9" in said
    assert f'run.name was "{before.run.name}", is "other"' in said


def test_of_many_only_some_are_named() -> None:
    before, now = ({f"k{key}": value for key in range(5)} for value in (1, 2))
    assert config_changes(json.dumps(before), json.dumps(now)) == (
        "k0 was 1, is 2, k1 was 1, is 2, k2 was 1, is 2, and 2 more"
    )


def test_a_key_that_one_of_them_does_not_have() -> None:
    assert (
        config_changes('{"a": {"b": 1}}', '{"a": {"c": [2]}}') == "a.b was 1, is not there, a.c was not there, is [2]"
    )


@given(TABLES, TABLES)
def test_nothing_is_said_of_what_is_equal_and_something_of_the_rest(one: object, other: object) -> None:
    assert bool(config_changes(json.dumps(one), json.dumps(other))) == (one != other)


def test_keys_of_data_that_came_later_change_the_hash_only_when_they_are_used() -> None:
    used: list[dict[str, Any]] = [
        {},
        {"dealt": False},
        {"limit": 5},
        {"split": "test"},
        {"mixture": [{}]},
        {"mixture": [{}, {}]},
    ]
    hashes = {RunConfig.model_validate({"data": data}).hash() for data in used}
    assert len(hashes) == 6
    assert RunConfig.model_validate({"data": {"dealt": True, "limit": 0, "mixture": []}}).hash() == RunConfig().hash()


def test_a_mixture_comes_through_its_canonical_form() -> None:
    config = RunConfig.model_validate(
        {"data": {"validation": 0.1, "mixture": [{"weight": 3}, {"path": "a", "source": "hf"}]}}
    )
    assert from_canonical(config.canonical()) == config
    [(first, one), (second, other)] = config.data.parts()
    assert (first, second) == (0.75, 0.25)
    assert (one.source, one.validation, other.path, other.mixture) == ("stdlib", 0.1, "a", ())


def test_a_top_k_goes_without_outer_momentum_unless_the_file_says_otherwise(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for algorithm in ("pier", "diloco"):
        outer = read(tmp_path, f'[outer]\nalgorithm = "{algorithm}"\ncodec = "topk2"').outer
        assert (outer.schedule, outer.momentum, outer.lr, outer.momentum_warmup) == ("constant", 0.0, 2.0, False)
        assert not caplog.messages
    outer = read(tmp_path, '[outer]\nalgorithm = "diloco"\ncodec = "topk"\nmomentum = 0.9\nlr = 0.7').outer
    assert (outer.momentum, outer.lr) == (0.9, 0.7)
    read(tmp_path, '[outer]\ncodec = "topk"\nschedule = "staged"')
    assert ["trains badly with much outer momentum" in message for message in caplog.messages] == [True, True]


def test_keys_of_error_feedback_leave_the_hash_as_it_was(tmp_path: Path) -> None:
    named = read(tmp_path, '[outer]\ndensity = 64\nerror_decay = 1.0\nresidual = "fp32"')
    assert named.hash() == RunConfig().hash()
    other = read(tmp_path, '[outer]\ncodec = "topk"\ndensity = 128\nerror_decay = 0.95')
    assert from_canonical(other.canonical()) == other
    assert other.hash() != read(tmp_path, '[outer]\ncodec = "topk"').hash()
    assert read(tmp_path, '[outer]\nresidual = "bf16"').hash() != RunConfig().hash()
