"""Bounds by auto_LiRPA's α-CROWN on interval bounds of the hidden layers."""

import dataclasses
import warnings

import numpy as np
import torch
from torch import nn

from benchmarks.networks.peers import common

warnings.filterwarnings("ignore", category=DeprecationWarning)
import auto_LiRPA  # noqa: E402
from auto_LiRPA import BoundedModule, BoundedTensor, PerturbationLpNorm  # noqa: E402

COMMIT = "a050a3d61f4cb68b108fa7f07dcb3e4d7ef304df"


def torch_network(network):
    """The network as an `nn.Sequential`."""
    modules, flat = [], False
    for place, layer in enumerate(network.layers):
        if place:
            modules.append(nn.ReLU() if network.activation == "relu" else nn.Softplus())
        out, into, *kernel = layer.weight.shape
        if layer.stride:
            module = nn.Conv2d(into, out, kernel, stride=layer.stride)
        else:
            if not flat:
                modules.append(nn.Flatten())
            flat, module = True, nn.Linear(into, out)
        module.weight.data = torch.from_numpy(layer.weight.copy())
        module.bias.data = torch.from_numpy(layer.bias.copy())
        modules.append(module)
    return nn.Sequential(*modules).eval()


def bounded(network, alphas, device):
    dense = alphas == "dense"
    options = {
        "sparse_features_alpha": not dense,
        "sparse_spec_alpha": not dense,
        "optimize_bound_args": {
            # The alphas are made by `bounds`, on the interval bounds: made by `compute_bounds`,
            # they come from a CROWN pass for every hidden layer, which nobody else pays.
            "init_alpha": False,
            "fix_interm_bounds": True,
            "use_shared_alpha": False,
            "early_stop_patience": 10**9,
        },
    }
    example = torch.zeros(1, 3, 32, 32, device=device)
    return BoundedModule(
        torch_network(network).to(device), example, bound_opts=options, device=device
    )


def _box(problems, part, device):
    nominal, lower, upper = (
        torch.from_numpy(getattr(problems, name)[part]).to(device)
        for name in ("nominal", "lower", "upper")
    )
    return BoundedTensor(nominal, PerturbationLpNorm(norm=np.inf, x_L=lower, x_U=upper))


def hidden_intervals(model, x):
    """auto_LiRPA's own interval bounds of what enters the activations."""
    with torch.no_grad():
        model.compute_bounds(x=(x,), method="IBP")
    inputs = [node.inputs[0] for node in model.get_enabled_opt_act()]
    return {node.name: (node.lower.detach(), node.upper.detach()) for node in inputs}


def bounds(model, problems, part, steps, device):
    """Bounds of a batch of images; `steps` evaluations, one fewer gradient steps."""
    model.bound_opts["optimize_bound_args"]["iteration"] = steps
    x, rows = _box(problems, part, device), torch.from_numpy(problems.rows[part]).to(device)
    hidden = hidden_intervals(model, x)
    model.init_alpha((x,), c=rows, bound_upper=False, interm_bounds=hidden)
    found, _ = model.compute_bounds(
        x=(x,), C=rows, method="CROWN-Optimized", bound_upper=False, interm_bounds=hidden
    )
    return found.detach().cpu().numpy()


def main():
    parser = common.parser(__doc__, steps="2,5,20")
    parser.add_argument("--batch", type=int, default=12, help="images bounded at once")
    parser.add_argument("--alphas", choices=["dense", "sparse"], default="dense")
    parser.add_argument("--device", default="cpu", help="where PyTorch computes: cpu or cuda")
    arguments = parser.parse_args()
    device = arguments.device
    network, problems, steps = common.read(arguments)
    count = len(problems.rows)
    parts = [slice(i, min(i + arguments.batch, count)) for i in range(0, count, arguments.batch)]
    about = {
        "peer": "auto_LiRPA",
        "version": auto_LiRPA.__version__,
        "commit": COMMIT,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "batch": arguments.batch,
        "alphas": arguments.alphas,
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
    }
    model = bounded(network, arguments.alphas, device)
    try:
        bounds(model, problems, parts[0], 2, device)  # warm-up
    except NotImplementedError as error:
        if network.activation == "relu":
            raise
        message = f"{network.activation}: {error}"
        print(f"unsupported: {message}")
        common.write(arguments, network, **about, unsupported=message, settings=[])
        return

    first = common.Problems(
        *(getattr(problems, field.name)[parts[0]] for field in dataclasses.fields(problems))
    )
    hidden = hidden_intervals(model, _box(problems, parts[0], device)).values()
    theirs = [tuple(x.cpu().numpy() for x in pair) for pair in hidden]
    about["interval_difference"] = common.check_intervals(network, first, theirs)

    settings = []
    for k in steps:
        cpu, wall, found = common.timed(
            lambda k=k: np.concatenate([bounds(model, problems, part, k, device) for part in parts])
        )
        settings.append(common.setting(k, cpu, wall, found))
    common.write(arguments, network, **about, settings=settings)


if __name__ == "__main__":
    main()
