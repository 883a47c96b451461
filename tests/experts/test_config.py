"""experts.toml: every error names the key, the value and what is allowed."""

from __future__ import annotations

from pathlib import Path

import pytest

from pier_node.base.errors import PierError
from pier_node.experts.config import DomainSection, ExpertsConfig, load
from pier_node.trainer.data.sources import FAMILIES

DOMAIN = '[[domains]]\nname = "topics"\n'
THREE = "".join(f'[[domains]]\nname = "{name}"\n' for name in ("topics", "network", "tools"))
SITE = '[[sites]]\nname = "a"\ntflops = 1.0\n'

ERRORS = {
    '[experts]\nheterogeneity = "MHe-IHe"': "experts.heterogeneity = \"MHe-IHe\": Input should be 'auto', 'MHo-IHo'",
    "[experts]\nsizes = [1.0, 1.0, 2.0]": "sizes = [1.0, 1.0, 2.0] must rise: S, M, L",
    "[experts]\nsizes = [0.5, 1.0, 2.0]": "sizes = [0.5, 1.0, 2.0] must begin with 1: S is the model of the run",
    "[experts]\nmin_lr = 1.0": "min_lr = 1 must not be above lr = 0.0003",
    "[experts]\nsteps = [500, 400, 300]": "steps = [500, 400, 300] must rise",
    "[experts]\nsteps = [300, 400]": "experts.steps",
    "[experts]\nbudget_flops = 1e15\nhorizon_s = 60": "set one of them",
    '[experts]\nlineage = "chain"': 'lineage = "chain" needs one of the paper\'s modes',
    "[experts]\nmax_epochs = 0.5": "experts.max_epochs = 0.5",
    '[experts]\ndifficulty = { topics = "hard" }': "difficulty: auto treats all domains alike",
    '[experts]\ndifficulty = { topics = "odd" }': "experts.difficulty.topics = \"odd\": Input should be 'easy'",
    '[experts]\nheterogeneity = "MHe-IHo"\ndifficulty = { cooking = "hard" }': "there is no domain 'cooking' in",
    "[plan]\ngap = -1": "plan.gap = -1",
    DOMAIN: "at least 3 items",
    THREE + DOMAIN: "two domains are called 'topics'",
    THREE + '[[domains]]\nname = "cooking"': "'cooking' is no built-in domain: topics, docstrings",
    THREE + '[[domains]]\nname = "mine"\nsource = "text"': 'source = "text" needs path',
    THREE + '[[domains]]\nname = "tools"\nwait = 2': "domains.3.wait: no such key; allowed here: name, source, path",
    THREE.replace('"tools"\n', '"tools"\nweight = 0\n'): "domains.2.weight = 0: Input should be greater than 0",
    THREE.replace('"tools"\n', '"tools"\nsites = ["b"]\n') + SITE: "domain 'tools': there is no site 'b' in [[sites]]",
    SITE + SITE: "two sites are called 'a'",
    '[[sites]]\nname = "a"': "sites.0.tflops",
    SITE + "memory = 3": "sites.0.memory: no such key; allowed here: name, tflops, memory_gb, line_mbit, hours",
    "[mixture]\ngamma = 1": "mixture: no such key; allowed here: experts, model, plan, domains, sites",
}


def read(folder: Path, text: str) -> ExpertsConfig:
    path = folder / "experts.toml"
    path.write_text(text)
    return load(path)


@pytest.mark.parametrize("text", ERRORS)
def test_errors_name_key_value_and_what_is_allowed(tmp_path: Path, text: str) -> None:
    with pytest.raises(PierError) as caught:
        read(tmp_path, text)
    assert ERRORS[text] in str(caught.value)
    assert "experts.toml" in str(caught.value)


def test_a_missing_file_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(PierError, match="pier-coordinator experts init"):
        load(tmp_path / "none.toml")


def test_an_empty_file_is_the_built_in_domains(tmp_path: Path) -> None:
    config = read(tmp_path, "")
    assert [domain.name for domain in config.domains] == [*FAMILIES]
    assert config.sites == ()


def test_sizes_differ_in_their_feed_forward_layers_alone(tmp_path: Path) -> None:
    config = read(tmp_path, '[model]\npreset = "llama-30m"\nlayers = 3')
    small, medium, large = config.sized()
    assert (small.ffn_dim, medium.ffn_dim, large.ffn_dim) == (1408, 2112, 2816)
    assert small == config.model
    assert large.model_copy(update={"ffn_dim": 1408}) == small


def test_a_domain_says_where_its_text_is() -> None:
    data = DomainSection(name="mine", source="jsonl", path="rows", text_field="body").data
    assert (data.source, data.path, data.text_field) == ("jsonl", "rows", "body")
