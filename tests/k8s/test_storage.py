"""The FSx volume and its claim, as stacks/ installs them."""

from k8s import storage

VOLUME = storage.fsx_volume(
    namespace="training",
    file_system_id="fs-0123",
    dns_name="fs-0123.fsx.us-west-2.amazonaws.com",
    mount_name="abcdefgh",
    capacity_gib=4800,
)
CLAIM = storage.fsx_claim(namespace="training", capacity_gib=4800)


def test_the_volume_is_the_given_file_system():
    assert VOLUME["spec"]["csi"] == {
        "driver": "fsx.csi.aws.com",
        "volumeHandle": "fs-0123",
        "volumeAttributes": {"dnsname": "fs-0123.fsx.us-west-2.amazonaws.com", "mountname": "abcdefgh"},
    }
    assert VOLUME["spec"]["mountOptions"] == ["flock", "noatime"]


def test_deleting_the_claim_keeps_the_data():
    assert VOLUME["spec"]["persistentVolumeReclaimPolicy"] == "Retain"


def test_volume_and_claim_are_bound_to_each_other():
    assert CLAIM["spec"]["volumeName"] == VOLUME["metadata"]["name"]
    assert VOLUME["spec"]["claimRef"] == {"name": CLAIM["metadata"]["name"], "namespace": "training"}
    assert VOLUME["spec"]["storageClassName"] == CLAIM["spec"]["storageClassName"] == ""
    assert VOLUME["spec"]["capacity"] == CLAIM["spec"]["resources"]["requests"] == {"storage": "4800Gi"}
    assert VOLUME["spec"]["accessModes"] == CLAIM["spec"]["accessModes"] == ["ReadWriteMany"]
