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
    assert VOLUME["spec"]["storageClassName"] == CLAIM["spec"]["storageClassName"] == "fsx-static"
    assert VOLUME["spec"]["capacity"] == CLAIM["spec"]["resources"]["requests"] == {"storage": "4800Gi"}
    assert VOLUME["spec"]["accessModes"] == CLAIM["spec"]["accessModes"] == ["ReadWriteMany"]


EXISTING = {
    "file_system_id": "fs-0123456789abcdef0",
    "dns_name": "fs-0123456789abcdef0.fsx.eu-west-1.amazonaws.com",
    "mount_name": "zyxwvuts",
    "capacity_gib": 9600,
}


def test_on_a_cluster_from_elsewhere_the_manifests_mount_the_file_system_that_the_job_names(render, changed):
    manifests = render(changed("p5-2node", cluster=False, job={"storage": EXISTING}))
    volume, claim = manifests.only("PersistentVolume"), manifests.only("PersistentVolumeClaim")
    assert volume["spec"]["csi"]["volumeHandle"] == EXISTING["file_system_id"]
    assert volume["spec"]["csi"]["volumeAttributes"] == {
        "dnsname": EXISTING["dns_name"],
        "mountname": EXISTING["mount_name"],
    }
    assert claim["spec"]["volumeName"] == volume["metadata"]["name"]
    assert volume["spec"]["claimRef"] == {key: claim["metadata"][key] for key in ("namespace", "name")}
    assert volume["spec"]["capacity"] == claim["spec"]["resources"]["requests"] == {"storage": "9600Gi"}
    assert volume["spec"]["storageClassName"] == claim["spec"]["storageClassName"] == "fsx-static"


def test_without_a_named_file_system_the_default_class_makes_one(render, changed):
    manifests = render(changed("p5-2node", cluster=False))
    assert [document for document in manifests.documents if document["kind"] == "PersistentVolume"] == []
    assert "volumeName" not in manifests.only("PersistentVolumeClaim")["spec"]
