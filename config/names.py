"""Strings and numbers that two sides must agree on: stacks, charts, trainer image and drills.

Exit codes are the trainer's own contract and stand in training/config.py, which imports nothing of ours.
"""

# Storage: claim, and where the trainer finds things inside its pod.
FSX_CLAIM = "fsx-training"
FSX_VOLUME = "fsx-training"
FSX_STORAGE_CLASS = "fsx-static"
FSX_MOUNT = "/fsx"
# Folders of the file system that are linked to S3; below the mount.
FSX_DATASETS = "/data"
FSX_RUNS = "/runs"
# The node's NVMe, for the local checkpoint tier: train.checkpoint.local lies below it.
LOCAL_MOUNT = "/local"
TRAIN_CONFIG_MOUNT = "/etc/training"
TRAIN_CONFIG_FILE = "train.json"

# Labels and taints that the node group sets and the charts select.
GPU_TAINT_KEY = "nvidia.com/gpu"
GPU_PRESENT_LABEL = "nvidia.com/gpu.present"
EFA_PRESENT_LABEL = "vpc.amazonaws.com/efa.present"
NODE_ROLE_LABEL = "node-role"
NODE_ROLE_GPU = "gpu"
NODE_ROLE_SYSTEM = "system"

# Extended resources advertised by the device plugins.
GPU_RESOURCE = "nvidia.com/gpu"
EFA_RESOURCE = "vpc.amazonaws.com/efa"

# Where a trainer offers its metrics.
METRICS_PORT = 9464
METRICS_PORT_NAME = "metrics"

# EKS's labels for EC2's network topology: layer 3 is the switch next to the node on p5.
NETWORK_LAYER_LABELS = ("topology.k8s.aws/network-node-layer-3", "topology.k8s.aws/network-node-layer-2")
