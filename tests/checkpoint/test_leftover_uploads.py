"""A restore aborts the uploads that dead trainers of its run have left, and nobody else's."""

from __future__ import annotations

import pytest
import torch

from lakeckpt.checkpoint.manager import CheckpointManager
from lakeckpt.checkpoint.parts import OBJECT_NAME, OBJECTS, SaveId
from tests.checkpoint.rig import Counter
from tests.lake.conftest import S3, moto_endpoint, s3

__all__ = ["moto_endpoint", "s3"]

OURS = SaveId(attempt=3, step=1200, number=7).object_path(11, 2, bytes(range(16)))
THEIRS = (
    "model.safetensors",
    "objects/model.safetensors",
    f"{OURS}.tmp",
    "objects/0000000003/model/00000-0000-00.safetensors",
    f"other/{OURS}",  # the run of another job, below this one's root
)


@pytest.mark.parametrize("root", ["", "runs/7/"])
def test_a_restore_aborts_no_upload_that_others_have_begun(s3: S3, root: str) -> None:
    theirs = sorted([*(root + key for key in THEIRS), "runs/8/" + OURS, "runs/7" + OURS])
    for key in (root + OURS, *theirs):
        s3.client.create_multipart_upload(Bucket=s3.bucket, Key=key)  # moto says that each was begun years ago
    place = f"s3://{s3.bucket}/{root}"
    with CheckpointManager(place, {"count": Counter()}, storage_options=s3.options) as manager:
        manager.restore()
    left = s3.client.list_multipart_uploads(Bucket=s3.bucket)["Uploads"]
    assert sorted(upload["Key"] for upload in left) == theirs


def test_what_a_save_writes_has_a_name_that_is_ours(s3: S3) -> None:
    model = torch.nn.Linear(3, 2)
    with CheckpointManager(f"s3://{s3.bucket}", {"model": model}, storage_options=s3.options) as manager:
        manager.restore()
        manager.step()
        manager.save()
    keys = s3.keys()
    written = [key for key in keys if key.startswith(OBJECTS)]
    assert written and all(OBJECT_NAME.fullmatch(key) for key in written)
