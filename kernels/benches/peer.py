"""The workloads of lora.rs on SGLang's triton_v2 LoRA kernels: python peer.py WHEEL [--beside] [NAME...]

WHEEL is what `pip download --no-deps sglang==0.5.23` fetches (or its LoRA files and metadata, zipped again). Needs torch,
triton, msgspec and pydantic, not the rest of SGLang: of the wheel only the LoRA kernels, their runner and its table of
launch settings are unpacked and loaded; what they import from elsewhere is replaced below. The runner chooses the
settings. Its pool has as many slots as the row has adapters and the row's highest rank, and its work lists are built
before the timing, as ours are. --beside: also with the base GEMMs, as the runner's own plan overlaps them.

Graph replay, medians of 21, weights and activations rotated through more than the L2. Every row is checked against
float64, all of its rows and columns, before it is timed."""

import enum
import statistics
import sys
import tempfile
import types
import zipfile
from pathlib import Path

import torch

# Outputs of what shares an input of so many values: q k v, o, gate up, down.
GROUPS = [(4096, (4096, 1024, 1024)), (4096, (4096,)), (4096, (14336, 14336)), (14336, (4096,))]
ZIPF = [22, 13, 9, 6, 5, 4, 2, 2, 1]
# Name, segment lengths by adapter, rank by adapter, whether it is a prefill.
ROWS = [
    ("lora_d1_r16_us", [1], [16], False),
    ("lora_d64_distinct_r16_us", [1] * 64, [16], False),
    ("lora_d64_zipf_r16_us", ZIPF, [16], False),
    ("lora_d256_uniform32_r16_us", [8] * 32, [16], False),
    ("lora_d256_128_r16_us", [2] * 128, [16], False),
    ("lora_d256_distinct_r16_us", [1] * 256, [16], False),
    ("lora_d64_distinct_r64_us", [1] * 64, [64], False),
    ("lora_d64_distinct_mixed_us", [1] * 64, [8, 16, 32, 64], False),
    ("lora_d64_distinct_r8_us", [1] * 64, [8], False),
    ("lora_prefill2048_r16_us", [512] * 4, [16], True),
    ("lora_prefill8192_r16_us", [512] * 16, [16], True),
    ("lora_prefill8192_r64_us", [512] * 16, [64], True),
]
DEVICE = torch.device("cuda", 0)


class Phase(str, enum.Enum):
    DECODE = "decode"
    PREFILL = "prefill"


def load(wheel, folder):
    """The peer's runner, workspace and version, with nothing of SGLang imported but its LoRA files."""
    with zipfile.ZipFile(wheel) as archive:
        wanted = ("sglang/srt/lora/", "sglang/kernels/ops/lora/")
        names = [n for n in archive.namelist() if n.startswith(wanted)]
        archive.extractall(folder, names)
        metadata = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        lines = archive.read(metadata).decode().splitlines()
    version = next(line.split(": ")[1] for line in lines if line.startswith("Version: "))

    def module(name, **members):
        made = types.ModuleType(name)
        made.__path__ = [str(Path(folder, *name.split(".")))]
        made.__dict__.update(members)
        sys.modules[name] = made

    def unused(*_, **__):
        raise NotImplementedError("the peer's CUDA route builder: it is not timed, and the Triton one is used")

    for name in ("sglang", "sglang.srt", "sglang.srt.lora", "sglang.kernels", "sglang.kernels.ops"):
        module(name)
    for name in ("sglang.kernels.ops.lora", "sglang.kernels.ops.lora.moe", "sglang.kernels.jit"):
        module(name)
    setting = types.SimpleNamespace(get=lambda: None)
    module("sglang.srt.environ", envs=types.SimpleNamespace(SGLANG_LORA_DENSE_CONFIG_DIR=setting))
    table = lambda major: "sm100" if major >= 10 else "sm90" if major == 9 else "default"
    module("sglang.srt.lora.utils", Phase=Phase, architecture_for_capability=table)
    module("sglang.kernels.jit.utils", is_arch_support_pdl=lambda: False)
    module("sglang.kernels.ops.lora.moe.virtual_experts", _align_block_size_jit=unused)

    from sglang.srt.lora.dense import plan, runner
    from sglang.srt.lora.workspace import LoraWorkspace

    small = runner.build_route

    def build_route(slots, **arguments):
        # Between its two Triton builders it has one in CUDA C++, which needs the rest of the package.
        return small(slots, **arguments, **({"capacity": 0} if slots.numel() > 512 else {}))

    runner.build_route = build_route
    return runner.DenseLoraRunner, LoraWorkspace, plan.DenseLoraKind.LINEAR, version


class Row:
    def __init__(self, peer, lengths, ranks, prefill):
        make_runner, make_workspace, self.kind, _ = peer
        slots = len(lengths)
        self.ranks = [ranks[s % len(ranks)] for s in range(slots)]
        self.rank = max(self.ranks)
        values = sum(self.ranks) * sum(k * len(n) + sum(n) for k, n in GROUPS)
        self.layers = min(64, max(2, 400_000_000 // (2 * values)))
        self.rows = sum(lengths)
        owner = torch.repeat_interleave(torch.arange(slots), torch.tensor(lengths))
        if not prefill:
            owner = owner[torch.randperm(self.rows)]
        self.owner = owner.to(DEVICE, torch.int32)
        noise = lambda *shape, std: torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) * std
        each = lambda make: [[make(k, n) for k, n in GROUPS] for _ in range(self.layers)]
        self.a = each(lambda k, n: noise(slots, len(n) * self.rank, k, std=0.05))
        self.b = each(lambda k, n: noise(slots, sum(n), self.rank, std=0.05))
        self.x = each(lambda k, n: noise(self.rows, k, std=1.0))
        self.y = each(lambda k, n: torch.zeros(self.rows, sum(n), device=DEVICE, dtype=torch.bfloat16))
        self.base = None
        self.stream = torch.cuda.Stream(DEVICE)
        self.runner = make_runner(make_workspace(), max_loras=slots, device=DEVICE)
        self.runner.begin_batch(
            token_slots=self.owner,
            lora_ranks=torch.tensor(self.ranks, dtype=torch.int32, device=DEVICE),
            scalings=torch.ones(slots, device=DEVICE),
            num_tokens=self.rows,
            phase=Phase.PREFILL if prefill else Phase.DECODE,
            graph_mode=True,
            is_prefill_graph=prefill,
        )

    def plan(self, group):
        k, n = GROUPS[group]
        return self.runner.plan_for(self.kind, self.rank, k, sum(n), num_tokens=self.rows)

    def offsets(self, group):
        n = GROUPS[group][1]
        return tuple(sum(n[:i]) for i in range(len(n) + 1))

    def alone(self, layer, group):
        """y += (x A) B, shrink and expand one after the other."""
        x, a, b, y = (t[layer % self.layers][group] for t in (self.x, self.a, self.b, self.y))
        plan, offsets = self.plan(group), self.offsets(group)
        bridge = self.runner.run_a(x, a, stack=len(offsets) - 1, plan=plan)
        self.runner.run_b(bridge, b, y, offsets=offsets, plan=plan)

    def gemm(self, layer, group):
        x, y = self.x[layer % self.layers][group], self.y[layer % self.layers][group]
        return torch.mm(x, self.base[layer % 2][group].t(), out=y)

    def together(self, layer, group):
        x, a, b = (t[layer % self.layers][group] for t in (self.x, self.a, self.b))
        base = lambda: self.gemm(layer, group)
        self.runner.apply(x, base, self.plan(group), a=a, b=b, offsets=self.offsets(group))

    def error(self):
        """The worst group's ||y - reference|| / ||reference||, y starting as zeros."""
        layer, worst = self.layers - 1, 0.0
        for group in range(len(GROUPS)):
            y, offsets = self.y[layer][group], self.offsets(group)
            y.zero_()
            torch.cuda.synchronize()
            with torch.cuda.stream(self.stream):
                self.alone(layer, group)
            torch.cuda.synchronize()
            expected = torch.zeros_like(y, dtype=torch.float64)
            for slot, r in enumerate(self.ranks):
                rows = (self.owner == slot).nonzero().squeeze(1)
                x = self.x[layer][group][rows].double()
                for s in range(len(offsets) - 1):
                    a = self.a[layer][group][slot, s * r : (s + 1) * r].double()
                    b = self.b[layer][group][slot, offsets[s] : offsets[s + 1], :r].double()
                    expected[rows, offsets[s] : offsets[s + 1]] = x @ a.t() @ b.t()
            gap = ((y.double() - expected).norm() / expected.norm()).item()
            assert gap < 1e-2, f"group {group} is wrong by {gap}"
            worst = max(worst, gap)
        return worst

    def time(self, operation):
        """Median microseconds per layer."""
        layers = max(self.layers, 16)
        step = lambda: [operation(layer, group) for layer in range(layers) for group in range(len(GROUPS))]
        with torch.cuda.stream(self.stream):
            step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream):
            step()
        took = []
        with torch.cuda.stream(self.stream):
            for _ in range(3):
                graph.replay()
            for _ in range(21):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                graph.replay()
                end.record()
                took.append((start, end))
        torch.cuda.synchronize()
        return statistics.median(s.elapsed_time(e) for s, e in took) * 1e3 / layers


def main():
    wheel, *rest = sys.argv[1:]
    beside, wanted = "--beside" in rest, [a for a in rest if not a.startswith("--")]
    torch.manual_seed(5)
    with tempfile.TemporaryDirectory() as folder:
        peer = load(wheel, folder)
        import triton

        card = torch.cuda.get_device_name(DEVICE)
        print(f"{card}, sglang {peer[3]}, torch {torch.__version__}, triton {triton.__version__}")
        print(f"{'row':32} {'us':>8} {'error':>9}  settings")
        for name, lengths, ranks, prefill in ROWS:
            if wanted and not any(w in name for w in wanted):
                continue
            row = Row(peer, lengths, ranks, prefill)
            error = row.error()
            us = row.time(row.alone)
            plans = {f"{p.a_family.value}/{p.b_family.value}/{p.block_size}" for p in map(row.plan, range(len(GROUPS)))}
            text = ", ".join(sorted(plans))
            if beside:
                noise = lambda k, n: torch.randn(sum(n), k, device=DEVICE, dtype=torch.bfloat16) * 0.02
                row.base = [[noise(k, n) for k, n in GROUPS] for _ in range(2)]
                base, both = row.time(row.gemm), row.time(row.together)
                text += f"; base {base:.1f} us, with LoRA {both:.1f} us, +{100 * (both / base - 1):.1f}%"
            print(f"{name:32} {us:8.1f} {error:9.1e}  {text}", flush=True)
            del row
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
