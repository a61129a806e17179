import sys
import threading
import time

import pytest

from mechicl.sweeps.folder import RESULTS
from tests.sweeps.runs import slow, sweep


def run(folder, **options):
    return sweep().run(folder, slow, progress=False, **options)


# ray starts its processes by fork: jax says so of itself where another test of this process has loaded it
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")
def test_a_cluster_of_two_that_loses_one_finishes_with_the_same_bytes(tmp_path):
    cluster_utils = pytest.importorskip("ray.cluster_utils")
    head = {"num_cpus": 1, "include_dashboard": False}
    cluster = cluster_utils.Cluster(initialize_head=True, head_node_args=head)
    try:
        second = cluster.add_node(num_cpus=1)
        done_then = []

        def lose_one():
            while not (done := list((tmp_path / "ray").glob("cells/*/rows.json"))):
                time.sleep(0.02)
            cluster.remove_node(second, allow_graceful=False)
            done_then.append(len(done))

        thread = threading.Thread(target=lose_one, daemon=True)
        thread.start()
        run(tmp_path / "ray", ray=cluster.address)
        thread.join()
        assert 1 <= done_then[0] < 4
    finally:
        cluster.shutdown()
    run(tmp_path / "serial", workers=1)
    assert (tmp_path / "ray" / RESULTS).read_bytes() == (tmp_path / "serial" / RESULTS).read_bytes()


def test_ray_is_an_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ValueError, match=r"pip install 'mechicl\[ray\]'"):
        run(tmp_path, ray="auto")
