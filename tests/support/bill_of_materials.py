"""Bill of materials of a wheel: CycloneDX JSON of the libraries that the wheel requires.

    python -m tests.support.bill_of_materials FOLDER

The command reads the wheel in FOLDER, and writes its bill of materials beside it. The versions are
those of the running environment, which `make` installs from constraints.txt.
"""

import argparse
import hashlib
import sys
import uuid
import zipfile
from collections.abc import Iterable, Iterator
from email.message import Message
from email.parser import Parser
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from cyclonedx.model import HashAlgorithm, HashType
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.license import DisjunctiveLicense, LicenseExpression
from cyclonedx.output import make_outputter
from cyclonedx.schema import OutputFormat, SchemaVersion
from packageurl import PackageURL
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

EXTRAS = ("guided", "s3", "traces")  # As in deploy/Containerfile.
LICENSE_CHARACTERS_MAX = 100  # Some distributions have the whole text of the license in the field.


def bill_of_materials(wheel: Path) -> str:
    """Return the JSON text for a wheel."""
    metadata = _wheel_metadata(wheel)
    bom = Bom(serial_number=uuid.uuid5(uuid.NAMESPACE_URL, wheel.name))
    root = _component(metadata, ComponentType.APPLICATION)
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    root.hashes.add(HashType(alg=HashAlgorithm.SHA_256, content=digest))
    bom.metadata.component = root
    components: dict[str, Component] = {}
    names = _add_libraries(bom, components, metadata, EXTRAS)
    bom.register_dependency(root, [components[name] for name in names])
    bom.components.update(components.values())
    return make_outputter(bom, OutputFormat.JSON, SchemaVersion.V1_6).output_as_string(indent=1)


def _add_libraries(
    bom: Bom, components: dict[str, Component], metadata: Message, extras: Iterable[str]
) -> list[str]:
    """Add the libraries that a distribution requires, and theirs; return the names of its own."""
    names: list[str] = []
    for requirement in _requirements(metadata, extras):
        name = canonicalize_name(requirement.name)
        try:
            library = Parser().parsestr(str(distribution(name).read_text("METADATA")))
        except PackageNotFoundError:
            continue  # A requirement of a platform or an extra that is not installed.
        names.append(name)
        if name not in components:
            components[name] = _component(library, ComponentType.LIBRARY)
            below = _add_libraries(bom, components, library, requirement.extras)
            bom.register_dependency(components[name], [components[other] for other in below])
    return names


def _requirements(metadata: Message, extras: Iterable[str]) -> Iterator[Requirement]:
    """Yield the requirements that apply in this environment."""
    for text in metadata.get_all("Requires-Dist", []):
        requirement = Requirement(text)
        environments = [{"extra": extra} for extra in ("", *extras)]
        if requirement.marker is None or any(map(requirement.marker.evaluate, environments)):
            yield requirement


def _component(metadata: Message, kind: ComponentType) -> Component:
    name, version = str(metadata["Name"]), str(metadata["Version"])
    url = PackageURL("pypi", name=canonicalize_name(name), version=version)
    component = Component(name=name, version=version, type=kind, purl=url, bom_ref=str(url))
    expression = metadata.get("License-Expression")
    if expression:
        component.licenses.add(LicenseExpression(expression))
    elif text := _license_name(metadata):
        component.licenses.add(DisjunctiveLicense(name=text))
    return component


def _license_name(metadata: Message) -> str:
    classifiers = [
        classifier.rpartition(" :: ")[2]
        for classifier in metadata.get_all("Classifier", [])
        if classifier.startswith("License ::")
    ]
    text = str(metadata.get("License") or "").splitlines()
    return ", ".join(classifiers) or "".join(text[:1])[:LICENSE_CHARACTERS_MAX]


def _wheel_metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.support.bill_of_materials", description=__doc__
    )
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="folder of the wheel")
    folder = parser.parse_args(argv).folder
    wheels = sorted(folder.glob("preamble-*.whl"), key=lambda path: path.stat().st_mtime)
    if not wheels:
        print(f"{folder} has no wheel; run make wheel", file=sys.stderr)
        return 1
    wheel = wheels[-1]
    name, version = wheel.name.split("-")[:2]
    target = folder / f"{name}-{version}.cdx.json"
    target.write_text(bill_of_materials(wheel))
    print(target)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
