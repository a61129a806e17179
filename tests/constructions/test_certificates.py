"""The table of constructions: exact ones are exact up to rounding."""

import pytest

from mechicl import constructions
from mechicl.constructions import certificates_table
from mechicl.constructions.certificates import certificates


@pytest.fixture(scope="module")
def table():
    return list(certificates(n_prompts=16))


def test_errors_of_constructions_are_as_stated(table):
    exact = [certificate for certificate in table if certificate.statement == "exact"]
    assert len(exact) >= 15
    assert {c.construction: c.max_relative_error for c in exact if not c.max_relative_error <= 1e-10} == {}
    others = [certificate for certificate in table if certificate.statement != "exact"]
    assert {certificate.construction for certificate in others} == {"copy_targets", "softmax_gradient_descent", "div"}
    for certificate in others:
        assert certificate.statement.startswith("O(")
        # div's 0.8^256 is below rounding, 12 e^-10 and 0.01² are not
        low, high = (0, 1e-12) if certificate.construction == "div" else (1e-6, 6e-4)
        assert low < certificate.max_relative_error < high


def test_every_construction_has_a_certificate(table):
    vocabulary = {"Head", "Hidden", "Layer", "Stream", "assemble", "with_pseudo_examples", "certificates_table"}
    vocabulary |= {
        "induction",
        "hide",
        "known_models",
        "compress",
        "weights_circuit",
    }  # tested elsewhere
    operations = {"aff", "div", "mov", "mul", "total"}
    assert {certificate.construction for certificate in table} == operations | set(constructions.__all__) - vocabulary


def test_layers_width_and_heads_are_those_of_the_models(table):
    sizes = {c.theorem: (c.layers, c.width, c.heads) for c in table}
    assert sizes["von Oswald et al. 2023, Proposition 1"] == (5, 8, 1)
    assert sizes["Fu et al. 2024, Theorem 1 (linear)"] == (7, 14, 1)
    assert sizes["Fu et al. 2024, Theorem 1 (relu)"] == (7, 14, 2)


def test_the_table_has_one_row_per_certificate(table):
    frame = certificates_table(n_prompts=16)
    columns = ["theorem", "construction", "layers", "width", "heads", "max_relative_error", "statement"]
    assert list(frame.columns) == columns
    assert frame.max_relative_error.tolist() == [certificate.max_relative_error for certificate in table]
    assert not frame.duplicated(["theorem", "statement"]).any()
