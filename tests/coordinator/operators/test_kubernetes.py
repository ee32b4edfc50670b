"""The Kubernetes operator by the real client, against an API server on loopback; and the manifests in deploy/."""

from __future__ import annotations

import dataclasses
import pathlib
import threading

import kubernetes
import pytest
import yaml

from rlframe.coordinator.messages import WorkerInfo
from rlframe.coordinator.operators import kubernetes as operators
from rlframe.coordinator.operators.base import OperatorError
from rlframe.coordinator.operators.kubernetes import KubernetesConfig, KubernetesOperator
from rlframe.coordinator.workers import process
from tests.coordinator.operators.cluster import Cluster
from tests.coordinator.operators.driven import Driven
from tests.waiting import wait_until

DEPLOY = pathlib.Path(__file__).parents[3] / "deploy" / "kubernetes"
DOCUMENTS = [
    document
    for name in ("coordinator.yaml", "workers.yaml")
    for document in yaml.safe_load_all((DEPLOY / name).read_text())
]
OWNER = {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "rlframe-coordinator", "uid": "uid-of-set"}


def the(kind: str, name: str) -> dict:
    (found,) = [each for each in DOCUMENTS if each["kind"] == kind and each["metadata"]["name"] == name]
    return found


def templates() -> dict:
    texts = the("ConfigMap", "rlframe-workers")["data"]
    return {name.removesuffix(".yaml"): yaml.safe_load(text) for name, text in texts.items()}


CONFIG = KubernetesConfig("train", "rl", "/rlframe/coordinator", templates(), "rlframe-coordinator-0")


def client_of(cluster) -> kubernetes.client.ApiClient:
    configuration = kubernetes.client.Configuration(host=cluster.url)
    configuration.retries = False
    return kubernetes.client.ApiClient(configuration)


@pytest.fixture
def cluster():
    (rules,) = the("Role", "rlframe-coordinator")["rules"]
    cluster = Cluster(verbs=rules["verbs"])
    own = {"name": "rlframe-coordinator-0", "ownerReferences": [{**OWNER, "controller": True}]}
    cluster.add({"metadata": own, "spec": {"containers": [{"name": "coordinator"}]}})
    yield cluster
    cluster.close()


@pytest.fixture
def make(cluster, tmp_path):
    made = []

    def make() -> Driven:
        made.append(Driven(KubernetesOperator(CONFIG, api=client_of(cluster), every=0.02), tmp_path))
        return made[-1]

    yield make
    for operator in made:
        operator.disconnect(end_workers=False)


@pytest.fixture
def operator(make):
    operator = make()
    assert operator.connect() == []
    return operator


def serving(operator, *keys):
    """Waits until exactly these incarnations serve, and returns them."""

    def are() -> list:
        infos = operator.list()
        return infos if [info.key for info in infos] == list(keys) and all(info.address for info in infos) else []

    return wait_until(are)


def test_a_worker_is_a_pod_with_an_address_once_it_serves(cluster, operator):
    cluster.runs_pods = False
    operator.request("collector", 1)
    wait_until(operator.list)
    assert operator.list()[0].address is None
    cluster.is_unschedulable("train-collector-0-0", "0/3 nodes are available: 3 Insufficient cpu.")
    problem = wait_until(lambda: operator.problems().get("collector/0"))
    assert problem == "collector/0 does not start: Unschedulable: 0/3 nodes are available: 3 Insufficient cpu."
    cluster.run("train-collector-0-0")
    (info,) = serving(operator, ("collector/0", 0))
    assert info.address == f"{cluster.pods['train-collector-0-0']['status']['podIP']}:7400"
    assert (info.role, info.index, info.host) == ("collector", 0, "node-1") and operator.problems() == {}
    pod = cluster.pods["train-collector-0-0"]
    assert pod["metadata"]["ownerReferences"] == [OWNER]
    assert pod["spec"]["restartPolicy"] == "Never"
    cluster.runs_pods = True
    cluster.delete_owner(OWNER["uid"])
    assert "train-collector-0-0" not in cluster.pods


def test_what_a_pod_runs_is_the_worker_that_it_is_called():
    container = operators.manifest(CONFIG, WorkerInfo("learner", 0, 3), None)["spec"]["containers"][0]
    assert container["command"] == ["python", "-m", process.__name__]
    options = process._parse(container["args"])
    assert (options.state_dir, options.role, options.index, options.incarnation) == (
        "/rlframe/coordinator",
        "learner",
        0,
        3,
    )
    assert (options.address, options.owner) == (f"$(POD_IP):{operators.PORT}", "")
    assert options.silence == 600.0  # a Pod of the coordinator may take minutes to move
    patient = dataclasses.replace(CONFIG, silence=1800.5)
    container = operators.manifest(patient, WorkerInfo("learner", 0, 3), None)["spec"]["containers"][0]
    assert process._parse(container["args"]).silence == 1800.5
    assert container["startupProbe"]["tcpSocket"]["port"] == operators.PORT


@pytest.mark.parametrize("exit_code, reason", [(1, "Error"), (137, "OOMKilled"), (0, "Completed")])
def test_one_that_ends_is_cleared_away_and_replaced(cluster, operator, exit_code, reason):
    operator.request("collector", 2)
    serving(operator, ("collector/0", 0), ("collector/1", 0))
    cluster.finish("train-collector-1-0", exit_code, reason)
    serving(operator, ("collector/0", 0), ("collector/1", 1))
    wait_until(lambda: "train-collector-1-0" not in cluster.pods)
    assert f"exit code {exit_code} ({reason})" in operator.problems()["collector/1"]


def test_one_that_is_deleted_or_evicted_by_somebody_else_is_replaced(cluster, operator):
    operator.request("collector", 2)
    serving(operator, ("collector/0", 0), ("collector/1", 0))
    cluster.evict("train-collector-0-0")  # it takes its time to end
    serving(operator, ("collector/0", 1), ("collector/1", 0))
    cluster.evict("train-collector-1-0")
    cluster.gone("train-collector-1-0")
    serving(operator, ("collector/0", 1), ("collector/1", 1))
    assert cluster.deletions == []


def test_a_report_deletes_without_grace_and_replaces_once_and_a_release_gives_time(cluster, operator):
    operator.request("collector", 2)
    serving(operator, ("collector/0", 0), ("collector/1", 0))
    for _ in range(3):
        operator.report_failed([("collector/0", 0)])
    serving(operator, ("collector/0", 1), ("collector/1", 0))
    operator.request("collector", 1)
    operator.release([("collector/1", 0)])
    assert [info.key for info in operator.list()] == [("collector/0", 1)]
    wait_until(lambda: "deletionTimestamp" in cluster.pods["train-collector-1-0"]["metadata"])
    cluster.gone("train-collector-1-0")
    assert cluster.deletions == [("train-collector-0-0", 0), ("train-collector-1-0", 10)]
    assert cluster.created == ["train-collector-0-0", "train-collector-1-0", "train-collector-0-1"]


def test_while_the_api_server_is_down_wishes_are_kept_and_carried_out_when_it_is_back(cluster, operator):
    operator.request("collector", 2)
    before = serving(operator, ("collector/0", 0), ("collector/1", 0))
    cluster.is_down = True

    def is_out() -> str:
        return operator.problems().get("", "")

    assert "answered 503" in wait_until(is_out)
    with pytest.raises(OperatorError, match="unable to handle the request"):
        operator.list()
    operator.request("collector", 3)
    operator.report_failed([before[0].key])
    cluster.is_down = False
    wait_until(lambda: not is_out())
    serving(operator, ("collector/0", 1), ("collector/1", 0), ("collector/2", 0))


def test_what_was_created_by_a_call_whose_answer_was_lost_is_there_once(cluster, operator):
    cluster.loses_answers = True
    operator.request("collector", 2)
    serving(operator, ("collector/0", 0), ("collector/1", 0))
    operator.report_failed([("collector/0", 0)])  # a deletion whose answer is lost, and which then is not found
    cluster.loses_answers = False
    wait_until(lambda: "train-collector-0-1" in cluster.pods)
    serving(operator, ("collector/0", 1), ("collector/1", 0))
    assert len(cluster.created) == len(set(cluster.created)) == 3


def test_ending_a_pod_that_has_just_gone_is_no_error(cluster):
    pods, worker = KubernetesOperator(CONFIG, api=client_of(cluster)), WorkerInfo("collector", 7, 1)
    for kill in (False, True):
        pods.stop(worker, kill)
    assert cluster.deletions == [] and cluster.used == ["delete", "delete"]
    cluster.is_down = True
    with pytest.raises(OperatorError, match="503 to delete_namespaced_pod"):
        pods.stop(worker, kill=True)


def test_a_name_that_is_taken_is_no_error(cluster, operator):
    theirs = {"name": "train-learner-0-0", "labels": {}}
    cluster.add({"metadata": theirs, "spec": {"containers": [{"name": "other"}]}})  # not found by the labels
    operator.request("learner", 1)
    serving(operator, ("learner/0", 1))  # 409 to the first, which then is not there: the next incarnation


def test_a_coordinator_that_is_new_adopts_the_pods_and_goes_on_with_their_incarnations(cluster, operator, make):
    operator.request("collector", 2)
    serving(operator, ("collector/0", 0), ("collector/1", 0))
    operator.report_failed([("collector/1", 0)])
    before = serving(operator, ("collector/0", 0), ("collector/1", 1))
    operator.disconnect(end_workers=False)
    cluster.pods.pop("train-collector-1-1")

    successor = make()
    assert successor.connect() == before[:1]
    successor.request("collector", 2)
    serving(successor, ("collector/0", 0), ("collector/1", 2))

    cluster_ends = threading.Thread(target=lambda: [_end_when_told(cluster, i) for i in ("0-0", "1-2")])
    cluster_ends.start()
    successor.disconnect()
    cluster_ends.join()
    assert list(cluster.pods) == ["rlframe-coordinator-0"]


def _end_when_told(cluster, which):
    name = f"train-collector-{which}"
    wait_until(lambda: "deletionTimestamp" in cluster.pods[name]["metadata"])
    cluster.gone(name)


def test_what_the_role_does_not_allow_is_said_with_where_the_role_is(cluster, make):
    cluster._verbs = {"create", "get"}
    with pytest.raises(OperatorError, match=r"403 to list_namespaced_pod: .*cannot list.*deploy/kubernetes"):
        make().connect()


def test_the_role_allows_just_what_the_operator_does(cluster, operator):
    operator.request("learner", 1)
    serving(operator, ("learner/0", 0))
    operator.report_failed([("learner/0", 0)])
    serving(operator, ("learner/0", 1))
    (rules,) = the("Role", "rlframe-coordinator")["rules"]
    assert (rules["apiGroups"], rules["resources"]) == ([""], ["pods"])
    assert sorted(set(cluster.used)) == sorted(rules["verbs"])


def test_the_manifests_fit_each_other_and_the_operator():
    client = kubernetes.client.ApiClient()
    for document in DOCUMENTS:
        parsed = getattr(kubernetes.client, f"V1{document['kind']}").from_dict(document)
        assert client.sanitize_for_serialization(parsed) == document  # every field is known
    stateful = the("StatefulSet", "rlframe-coordinator")
    pod = stateful["spec"]["template"]
    assert stateful["spec"]["selector"]["matchLabels"] == pod["metadata"]["labels"]
    assert the("Service", stateful["spec"]["serviceName"])["spec"]["selector"] == pod["metadata"]["labels"]
    account = pod["spec"]["serviceAccountName"]
    binding = the("RoleBinding", "rlframe-coordinator")
    assert binding["subjects"] == [
        {"kind": "ServiceAccount", "name": the("ServiceAccount", account)["metadata"]["name"]}
    ]
    assert binding["roleRef"]["name"] == the("Role", "rlframe-coordinator")["metadata"]["name"]
    worker = operators.manifest(CONFIG, WorkerInfo("learner", 0, 0), None)
    labels = worker["metadata"]["labels"]
    service = the("Service", "rlframe-workers")
    assert service["spec"]["selector"] == operators.labels_of("train")
    assert operators.labels_of("train").items() <= labels.items()
    assert service["spec"]["ports"][0]["port"] == operators.PORT and worker["spec"]["subdomain"] == "rlframe-workers"
    assert the("NetworkPolicy", "rlframe-workers")["spec"]["podSelector"]["matchLabels"] == operators.labels_of("train")
    # The StatefulSet must not take the workers' Pods for its own.
    assert not stateful["spec"]["selector"]["matchLabels"].items() <= labels.items()
    claim = the("PersistentVolumeClaim", "rlframe-train")["metadata"]["name"]
    for spec in [pod["spec"], *(template["spec"] for template in templates().values())]:
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        assert volumes["run"]["persistentVolumeClaim"]["claimName"] == claim
        assert {mount["name"] for mount in spec["containers"][0]["volumeMounts"]} == set(volumes)


def test_names_that_kubernetes_would_refuse_are_refused_before(tmp_path):
    with pytest.raises(ValueError, match="The run's name 'My_Run' cannot be part of a Pod's"):
        KubernetesConfig("My_Run", "rl", "/rlframe", templates())
    with pytest.raises(ValueError, match=r"The template of the role 'learner' has no spec\.containers"):
        KubernetesConfig("train", "rl", "/rlframe", {"learner": {}})
    with pytest.raises(ValueError, match="silence must be more than 0 seconds, got 0"):
        dataclasses.replace(CONFIG, silence=0.0)
    with pytest.raises(ValueError, match=r"has no ROLE\.yaml"):
        operators.load_templates(tmp_path)
    for role, template in templates().items():
        (tmp_path / f"{role}.yaml").write_text(yaml.safe_dump(template))
    assert operators.load_templates(tmp_path) == templates()
