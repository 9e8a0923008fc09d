"""The workloads of cpu.rs on llama.cpp, as csv: python llama_bench.py MODEL.gguf [THREADS] [processor-time]

Needs llama-cpp-python. Greedy, as cpu.rs; the best of some repetitions."""

import ctypes
import sys
import time

import llama_cpp as L
import numpy as np

PROMPT, STEPS, PREFILL, REPETITIONS = 64, 24, 512, 3
model_path = sys.argv[1]
threads = int(sys.argv[2]) if len(sys.argv) > 2 else 2
clock = time.process_time if sys.argv[3:] == ["processor-time"] else time.perf_counter

quiet = L.llama_log_callback(lambda level, text, data: None)
L.llama_log_set(quiet, ctypes.c_void_p(0))
L.llama_backend_init()
model = L.llama_model_load_from_file(model_path.encode(), L.llama_model_default_params())
vocabulary = L.llama_vocab_n_tokens(L.llama_model_get_vocab(model))
parameters = L.llama_context_default_params()
parameters.n_ctx, parameters.n_batch, parameters.n_ubatch, parameters.n_seq_max = 8192, 2048, 512, 32
parameters.n_threads = parameters.n_threads_batch = threads
parameters.kv_unified = True  # one sequence may be longer than its share
context = L.llama_init_from_model(model, parameters)
memory = L.llama_get_memory(context)
batch = L.llama_batch_init(2048, 0, 1)


def step(rows):
    """rows: (sequence, position, token, wants logits); greedy tokens of the rows that want logits."""
    batch.n_tokens = len(rows)
    for i, (sequence, position, token, logits) in enumerate(rows):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = token, position, 1, sequence, logits
    assert L.llama_decode(context, batch) == 0
    return [int(np.ctypeslib.as_array(L.llama_get_logits_ith(context, i), (vocabulary,)).argmax()) for i, row in enumerate(rows) if row[3]]


def decode(count):
    L.llama_memory_clear(memory, True)
    for s in range(count):
        step([(s, i, 1000 + 37 * i + s, i == PROMPT - 1) for i in range(PROMPT)])
    best = 1e9
    for repetition in range(REPETITIONS):
        start = clock()
        for i in range(STEPS):
            step([(s, PROMPT + repetition * STEPS + i, 42, True) for s in range(count)])
        best = min(best, clock() - start)
    return count * STEPS / best


def prefill():
    best = 1e9
    for _ in range(REPETITIONS):
        L.llama_memory_clear(memory, True)
        start = clock()
        step([(0, i, (500 + 61 * i) % vocabulary, i == PREFILL - 1) for i in range(PREFILL)])
        best = min(best, clock() - start)
    return PREFILL / best


print("workload,value,unit")
for count in (1, 8, 32):
    print(f"decode_{count},{decode(count):.1f},tokens/s", flush=True)
print(f"prefill_{PREFILL},{prefill():.1f},tokens/s", flush=True)
