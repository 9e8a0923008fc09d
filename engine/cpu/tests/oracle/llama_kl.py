"""How far llama.cpp is from the oracle of truth.py on the same prompts and tokens: the figure that ours stands beside.

    python llama_kl.py --base SmolLM2-135M-Instruct.Q4_1.gguf --truth ../golden/truth

Teacher-forced along the oracle's tokens of the base. KL(oracle || llama.cpp) in nats, over the oracle's 64 best tokens and
one bucket for all others; mean over the positions of `base.top64.bin`. Writes `llama_cpp.json` beside the golden files.
"""

import argparse
import json
import pathlib

import llama_cpp
import numpy


def top_rows(path, top):
    """Ids and log-probabilities of each recorded position."""
    row = numpy.dtype([("ids", "<u2", top), ("logprobs", "<f4", top)])
    return numpy.fromfile(path, dtype=row)


def kl(row, logprobs):
    """Of the oracle's row to a whole distribution, the tail as one bucket."""
    mine, other = row["logprobs"].astype(numpy.float64), logprobs[row["ids"]]
    p, q = numpy.exp(mine), numpy.exp(other)
    tail_p, tail_q = max(1e-12, 1 - p.sum()), max(1e-12, 1 - q.sum())
    return float((p * (mine - other)).sum() + tail_p * numpy.log(tail_p / tail_q))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", type=pathlib.Path, required=True)
    parser.add_argument("--truth", type=pathlib.Path, required=True)
    arguments = parser.parse_args()
    truth = json.loads((arguments.truth / "base.json").read_text())
    rows = iter(top_rows(arguments.truth / "base.top64.bin", truth["top"]))
    model = llama_cpp.Llama(str(arguments.base), n_ctx=512, n_batch=512, n_threads=2, logits_all=True, verbose=False)
    divergences, same, near, largest = [], 0, 0, 0.0
    for case in truth["cases"]:
        model.reset()
        model.eval(case["prompt"] + case["tokens"][:-1])
        scores = model.scores[len(case["prompt"]) - 1 : len(case["prompt"]) - 1 + truth["tokens"]].astype(numpy.float64)
        logprobs = scores - numpy.logaddexp.reduce(scores, axis=-1, keepdims=True)
        for position, token in enumerate(case["tokens"]):
            right = int(logprobs[position].argmax()) == token
            same += right
            near += not right and case["gaps"][position] < 0.05
            largest = max(largest, abs(float(logprobs[position][token]) - case["logprobs"][position]))
            if position % truth["top_every"] == 0:
                divergences.append(kl(next(rows), logprobs[position]))
    count = sum(len(case["tokens"]) for case in truth["cases"])
    figures = {
        "llama_cpp_python": llama_cpp.__version__,
        "settings": "CPU, 2 threads, Q4_1 weights, activations and KV cache as llama.cpp chooses (q8 products, f16 cache)",
        "positions": len(divergences),
        "mean_kl_nats": round(float(numpy.mean(divergences)), 6),
        "largest_kl_nats": round(float(numpy.max(divergences)), 6),
        "tokens": count,
        "same_greedy_token": same,
        "other_token_where_the_gap_is_below_0.05": near,
        "largest_logprob_difference_on_greedy_token": round(largest, 4),
    }
    (arguments.truth / "llama_cpp.json").write_text(json.dumps(figures, indent=1) + "\n")
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
