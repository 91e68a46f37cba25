"""The shared volume: FSx for Lustre as a static PersistentVolume, and the one claim that every pod mounts.

Where there is a cluster section, stacks/ installs both with the cluster, and the manifests repeat the claim. Without
one, `SharedChart` renders both for the file system of `job.storage`, else a claim for the default storage class.
"""

from typing import Any

from cdk8s_plus_33 import k8s as kube

from config import names

_FSX_DRIVER = "fsx.csi.aws.com"
_SHARED = ["ReadWriteMany"]


def fsx_storage_class() -> dict[str, Any]:
    """Manifest of the class of volume and claim."""
    return kube.KubeStorageClass.manifest(**fsx_storage_class_fields())


def fsx_storage_class_fields() -> dict[str, Any]:
    """A class that makes nothing: it binds claims to volumes that exist, and keeps the default provisioner away.

    Without it any claim in the namespace could order a file system of hundreds of dollars a month, for which the
    driver would need the right to create and delete file systems, too.
    """
    return {
        "metadata": kube.ObjectMeta(name=names.FSX_STORAGE_CLASS),
        "provisioner": "kubernetes.io/no-provisioner",
        "reclaim_policy": "Retain",
        "volume_binding_mode": "Immediate",
    }


def fsx_volume(
    *, namespace: str, file_system_id: str, dns_name: str, mount_name: str, capacity_gib: int
) -> dict[str, Any]:
    """Manifest of the PersistentVolume for a file system. Names may be CDK tokens."""
    volume = fsx_volume_props(
        namespace=namespace,
        file_system_id=file_system_id,
        dns_name=dns_name,
        mount_name=mount_name,
        capacity_gib=capacity_gib,
    )
    return kube.KubePersistentVolume.manifest(metadata=volume.metadata, spec=volume.spec)


def fsx_volume_props(
    *, namespace: str, file_system_id: str, dns_name: str, mount_name: str, capacity_gib: int
) -> kube.KubePersistentVolumeProps:
    """The PersistentVolume for a file system that exists by the time it is mounted.

    Static, since the driver's dynamic provisioning makes a file system of version 2.10, whose mount fails on AL2023
    (aws-fsx-csi-driver #399, #437).
    """
    return kube.KubePersistentVolumeProps(
        metadata=kube.ObjectMeta(name=names.FSX_VOLUME),
        spec=kube.PersistentVolumeSpec(
            capacity={"storage": _gib(capacity_gib)},
            access_modes=_SHARED,
            persistent_volume_reclaim_policy="Retain",
            storage_class_name=names.FSX_STORAGE_CLASS,
            claim_ref=kube.ObjectReference(namespace=namespace, name=names.FSX_CLAIM),  # no other claim may take it
            # flock: data-set libraries lock files, and a Lustre client refuses that by default.
            mount_options=["flock", "noatime"],
            csi=kube.CsiPersistentVolumeSource(
                driver=_FSX_DRIVER,
                volume_handle=file_system_id,
                volume_attributes={"dnsname": dns_name, "mountname": mount_name},
            ),
        ),
    )


def fsx_claim(*, namespace: str, capacity_gib: int) -> dict[str, Any]:
    """Manifest of the claim on that volume."""
    claim = fsx_claim_props(namespace=namespace, capacity_gib=capacity_gib)
    return kube.KubePersistentVolumeClaim.manifest(metadata=claim.metadata, spec=claim.spec)


def fsx_claim_props(*, namespace: str, capacity_gib: int) -> kube.KubePersistentVolumeClaimProps:
    """The claim bound to that volume by name."""
    return kube.KubePersistentVolumeClaimProps(
        metadata=kube.ObjectMeta(name=names.FSX_CLAIM, namespace=namespace),
        spec=_claim_spec(capacity_gib, volume_name=names.FSX_VOLUME, storage_class_name=names.FSX_STORAGE_CLASS),
    )


def default_class_claim(*, namespace: str, capacity_gib: int) -> kube.KubePersistentVolumeClaimProps:
    """The same claim where there is no FSx: from the default storage class, which must offer ReadWriteMany."""
    return kube.KubePersistentVolumeClaimProps(
        metadata=kube.ObjectMeta(name=names.FSX_CLAIM, namespace=namespace), spec=_claim_spec(capacity_gib)
    )


def _claim_spec(
    capacity_gib: int, *, volume_name: str | None = None, storage_class_name: str | None = None
) -> kube.PersistentVolumeClaimSpec:
    return kube.PersistentVolumeClaimSpec(
        access_modes=_SHARED,
        storage_class_name=storage_class_name,
        volume_name=volume_name,
        resources=kube.VolumeResourceRequirements(requests={"storage": _gib(capacity_gib)}),
    )


def _gib(amount: int) -> kube.Quantity:
    return kube.Quantity.from_string(f"{amount}Gi")
