"""`stagecert supports`: what can be verified, in the words of the VNN-LIB standard."""

from typing import Annotated

import typer

# What the standard says that depends on nothing; what does is looked up.
_CAPABILITIES = {
    # Proofs are in real arithmetic, so that is the only type that may be claimed.
    "onnx-element-types": ["real"],
    "vnnlib-versions": ["1.0", "2.0"],
    "hidden-node-theories": ["NH", "H"],
    "multiple-input-output-theories": ["SIO", "MIO"],
    "multiple-network-theories": ["SNET", "MENET", "MINET", "MNET"],
    "multiple-node-comparison-theories": ["SNC", "MNC"],
    "arithmetic-complexity-theories": ["BND", "COUT", "LIN", "POLY"],
    # Every case is decided apart, but those with the same inputs share their bounds.
    "optimised-disjunctive-reasoning": ["true"],
    "serialise-assignments": ["true"],
}
_COMPUTED = ("onnx-opset-versions", "onnx-operators")


def supports(
    capability: Annotated[
        str,
        typer.Argument(help="Such as --onnx-operators; see the page about verifying."),
    ],
) -> None:
    """Says what can be verified, in the words of the VNN-LIB standard."""
    name = capability.removeprefix("--")
    if name in _CAPABILITIES:
        found = _CAPABILITIES[name]
    elif name in _COMPUTED:
        import onnx

        from stagecert.networks.importers.onnx import model as importer

        newest = onnx.defs.onnx_opset_version()
        found = importer.supported()
        if name == "onnx-opset-versions":
            found = [str(importer.OLDEST_OPSET), str(newest)]
    else:
        known = ", ".join(f"--{one}" for one in sorted((*_CAPABILITIES, *_COMPUTED)))
        typer.echo(f"Unknown capability {capability!r}; known are {known}.", err=True)
        raise typer.Exit(2)
    typer.echo("\n".join(found))
