"""An independent check of certificates, with nothing in common with what finds them.

report = stagecert.rigor.check("model.onnx", "property.vnnlib", "proof.cert")
report.accepted, report.reasons
"""

from stagecert.rigor.checker import Report, check

__all__ = ["Report", "check"]
