"""Set-up of a checkout: `.venv` with pinned packages, NVRx 0.7.0, and the CDK CLI. Run by `make setup`.

Needs Python 3.11+ and Node 20+; uses pip and npm only. The first lines run on any Python, to say so.
"""

import os
import shutil
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.abspath(__file__))
VENV = os.path.join(ROOT, ".venv")
PYTHON = os.path.join(VENV, "bin", "python")
READY = os.path.join(VENV, ".ready")

TORCH = "torch==2.13.0"
NVRX = "nvidia-resiliency-ext==0.7.0"
# Where pip has no matching wheel (older glibc, other Python), the one for this platform is installed all the same:
# apart from the CUPTI straggler module, which is not used, it is plain Python.
NVRX_PLATFORM = ["--platform", "manylinux_2_39_x86_64", "--python-version", "3.12"]


def main():
    """Set everything up; 0 when it is ready."""
    check_python()
    check_node()
    if not os.path.exists(PYTHON):
        say("creating .venv")
        run([sys.executable, "-m", "venv", VENV])
    say("installing Python packages (a few minutes the first time)")
    install_torch()
    pip("install", "-r", "requirements.txt", "-r", "training/requirements.txt", "-r", "requirements-dev.txt")
    install_nvrx()
    say("installing the CDK CLI")
    run(["npm", "ci", "--no-audit", "--no-fund", "--loglevel=error"])
    with open(READY, "w") as stamp:
        stamp.write("made by bootstrap.py\n")
    say("ready")
    return 0


def check_python():
    """Stop unless this Python is new enough."""
    if sys.version_info < (3, 11):
        stop(
            "Python %d.%d is too old: 3.11 or newer is needed; "
            "name one with `make PYTHON=/path/to/python3.12 setup`" % sys.version_info[:2]
        )


def check_node():
    """Stop unless Node and npm are there and new enough."""
    for tool in ("node", "npm"):
        if shutil.which(tool) is None:
            stop(
                "%s is not on PATH: the CDK CLI needs Node 20 or newer with npm; install them, then run make setup"
                % tool
            )
    version = subprocess.run(["node", "--version"], capture_output=True, text=True, check=True).stdout.strip()
    if int(version.lstrip("v").split(".")[0]) < 20:
        stop("Node %s is too old: the CDK CLI needs Node 20 or newer; update it and run make setup again" % version)


def install_torch():
    """Install torch, a CPU build where there is no GPU and pip is offered one; else what the index has."""
    if not os.path.exists("/dev/nvidiactl") and pip("install", TORCH + "+cpu", check=False, quiet=True) == 0:
        return
    pip("install", TORCH)


def install_nvrx():
    """Install NVRx 0.7.0 as pip would where its wheel fits, and the same wheel retagged where it does not."""
    if nvrx_version() == NVRX.partition("==")[2]:
        return
    if pip("install", "--no-deps", "--only-binary=:all:", NVRX, check=False, quiet=True) == 0:
        return
    with tempfile.TemporaryDirectory() as folder:
        pip("download", "--no-deps", "--only-binary=:all:", *NVRX_PLATFORM, "--dest", folder, NVRX)
        tags = ["--python-tag", "py3", "--abi-tag", "none", "--platform-tag", "any", "--remove"]
        run([PYTHON, "-m", "wheel", "tags", *tags, os.path.join(folder, os.listdir(folder)[0])])
        pip("install", "--no-deps", os.path.join(folder, os.listdir(folder)[0]))


def nvrx_version():
    """The installed NVRx's version, or an empty string."""
    code = "from importlib.metadata import version; print(version('nvidia-resiliency-ext'))"
    return subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, check=False).stdout.strip()


def pip(*arguments, check=True, quiet=False):
    """Run pip inside .venv; returns its exit code, or stops when it failed and `check` is set."""
    command = [PYTHON, "-m", "pip", "--disable-pip-version-check", arguments[0], "--quiet", *arguments[1:]]
    return run(command, check=check, quiet=quiet)


def run(command, check=True, quiet=False):
    """Run a command in the checkout's root; returns its exit code, or stops when it failed and `check` is set."""
    output = subprocess.DEVNULL if quiet else None
    code = subprocess.run(command, cwd=ROOT, check=False, stdout=subprocess.DEVNULL, stderr=output).returncode
    if code and check:
        stop("`%s` failed; its message is above. Mend that and run make setup again" % " ".join(command[:6]))
    return code


def say(text):
    """One line of progress."""
    print("setup: " + text, flush=True)


def stop(text):
    """End with a one-line error."""
    sys.stderr.write("error: %s\n" % text)
    sys.exit(2)


if __name__ == "__main__":
    sys.exit(main())
