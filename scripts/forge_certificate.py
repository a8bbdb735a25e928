"""Makes a certificate claim another property: python forge_certificate.py CERTIFICATE PROPERTY OUT.

For a property that is violated, no checker may accept what comes out; `make dist` tries that.
"""

import hashlib
import json
import sys
import zipfile
from pathlib import Path


def forge(certificate: Path, property: Path, out: Path) -> None:
    """Writes the certificate with the hash of the property in its header."""
    digest = hashlib.sha256(property.read_bytes()).hexdigest()
    with zipfile.ZipFile(certificate) as given, zipfile.ZipFile(out, "w") as made:
        for name in given.namelist():
            data = given.read(name)
            if name == "header.json":
                data = json.dumps(json.loads(data) | {"property_sha256": digest}).encode()
            made.writestr(name, data)


if __name__ == "__main__":
    forge(*map(Path, sys.argv[1:]))
