import sys

import pytest

from mechicl.sweeps.folder import RESULTS
from tests.sweeps.runs import slow, sweep


def run(folder, **options):
    return sweep().run(folder, slow, progress=False, **options)


def test_a_cluster_of_two_that_loses_one_finishes_with_the_same_bytes(tmp_path):
    cluster_utils = pytest.importorskip("ray.cluster_utils")
    head = {"num_cpus": 1, "include_dashboard": False}
    cluster = cluster_utils.Cluster(initialize_head=True, head_node_args=head)
    try:
        second = cluster.add_node(num_cpus=1)
        lost = []

        def lose_one(table):
            if len(table.frame) and not lost:
                lost.append(len(table.frame))
                cluster.remove_node(second, allow_graceful=False)

        run(tmp_path / "ray", ray=cluster.address, on_result=lose_one)
        assert lost[0] < 8  # before the last cells were done
    finally:
        cluster.shutdown()
    run(tmp_path / "serial", workers=1)
    assert (tmp_path / "ray" / RESULTS).read_bytes() == (tmp_path / "serial" / RESULTS).read_bytes()


def test_ray_is_an_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ValueError, match=r"pip install 'mechicl\[ray\]'"):
        run(tmp_path, ray="auto")
