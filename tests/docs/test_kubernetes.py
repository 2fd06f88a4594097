"""The manifest of docs/how-to/kubernetes.md is a JobSet by the models of its API, and its parts fit together."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet

HOW_TO = Path(__file__).resolve().parents[2] / "docs" / "how-to"


@pytest.fixture
def manifest() -> dict[str, Any]:
    loaded = yaml.safe_load((HOW_TO / "jobset.yaml").read_text(encoding="utf-8"))
    assert isinstance(loaded, dict)
    return loaded


@pytest.fixture
def job(manifest: dict[str, Any]) -> dict[str, Any]:
    (ranks,) = manifest["spec"]["replicatedJobs"]
    spec = ranks["template"]["spec"]
    assert isinstance(spec, dict)
    return spec


def strict(manifest: dict[str, Any]) -> None:
    """Raise unless ``manifest`` is a JobSet and has no field that the models do not know (they drop such fields)."""
    known = JobsetV1alpha2JobSet.from_dict(manifest)
    assert known is not None
    assert known.to_dict() == manifest


def test_the_page_shows_the_manifest() -> None:
    page = (HOW_TO / "kubernetes.md").read_text(encoding="utf-8")
    assert re.findall(r"^```yaml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL) == [
        (HOW_TO / "jobset.yaml").read_text(encoding="utf-8")
    ]


def test_the_manifest_is_a_jobset_without_unknown_fields(manifest: dict[str, Any]) -> None:
    strict(manifest)


@pytest.mark.parametrize("path", ["spec", "spec replicatedJobs 0 template spec template spec", "spec failurePolicy"])
def test_a_misspelled_field_is_noticed(manifest: dict[str, Any], path: str) -> None:
    place: Any = manifest
    for step in path.split():
        place = place[int(step) if step.isdigit() else step]
    place["terminationGracePeriod"] = 120
    with pytest.raises(AssertionError):
        strict(manifest)


def test_ranks_find_each_other(manifest: dict[str, Any], job: dict[str, Any]) -> None:
    (container,) = job["template"]["spec"]["containers"]
    values = {one["name"]: one.get("value") for one in container["env"]}
    name, (ranks,) = manifest["metadata"]["name"], manifest["spec"]["replicatedJobs"]
    assert values["MASTER_ADDR"] == f"{name}-{ranks['name']}-0-0.{name}"
    assert int(values["WORLD_SIZE"]) == job["parallelism"] == job["completions"]


def test_status_143_and_evictions_do_not_count_as_faults(manifest: dict[str, Any], job: dict[str, Any]) -> None:
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    by_condition, by_status = job["podFailurePolicy"]["rules"]
    assert by_condition == {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    assert by_status["onExitCodes"] == {"containerName": container["name"], "operator": "In", "values": [128 + 15]}
    assert (pod["restartPolicy"], job["backoffLimit"]) == ("Never", 0)
    (rule,) = manifest["spec"]["failurePolicy"]["rules"]
    assert (rule["action"], rule["onJobFailureReasons"]) == ("RestartJobSetAndIgnoreMaxRestarts", ["PodFailurePolicy"])


def test_shared_memory_is_mounted_and_within_the_limit(job: dict[str, Any]) -> None:
    pod = job["template"]["spec"]
    (container,), (volume,) = pod["containers"], pod["volumes"]
    assert container["volumeMounts"] == [{"name": volume["name"], "mountPath": "/dev/shm"}]
    assert volume["emptyDir"]["medium"] == "Memory"
    size, limit = volume["emptyDir"]["sizeLimit"], container["resources"]["limits"]["memory"]
    assert size.endswith("Gi") and limit.endswith("Gi")
    assert int(size[:-2]) < int(limit[:-2])
