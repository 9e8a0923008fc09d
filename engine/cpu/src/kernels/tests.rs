//! Every kernel against f64, and every instruction set against the portable one bit for bit.

use std::time::{Duration, Instant};

use lorafleet_artifact::FloatType;
use lorafleet_backend::model::{MatrixView, RowOrder, StoredType};

#[path = "../../../tests/support/random.rs"]
mod random;

use random::Random;

use super::attention::{AttentionItem, GroupPtr, Query};
use super::gemm::GemmItem;
use super::lora::{ExpandItem, RowPtr, ShrinkItem};
use super::rows::{GateItem, NormItem, RotateItem};
use super::simd::LANES;
use super::*;
use crate::panel::{pack_panel, panel_bytes, unpack_row};
use crate::rows::{packed_floats, placed, tiles};

fn stored(values: &[f32], float: FloatType) -> Vec<u8> {
    let one = |value: &f32| match float {
        FloatType::F32 => value.to_le_bytes().to_vec(),
        FloatType::F16 => half::f16::from_f32(*value).to_le_bytes().to_vec(),
        FloatType::Bf16 => half::bf16::from_f32(*value).to_le_bytes().to_vec(),
    };
    values.iter().flat_map(one).collect()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

fn assert_close(found: &[f32], expected: &[f64], what: &str) {
    let norm = expected.iter().map(|value| value * value).sum::<f64>().sqrt();
    let difference = found.iter().zip(expected).map(|(f, e)| (f64::from(*f) - e).powi(2)).sum::<f64>().sqrt();
    assert!(difference <= 1e-6 * norm.max(1e-3), "{what}: relative error {}", difference / norm);
}

/// Runs on every instruction set, compares bits, and gives the result back.
fn on_all(what: &str, run: impl Fn(&'static Kernels) -> Vec<f32>) -> Vec<f32> {
    let expected = run(&portable::KERNELS);
    for kernels in Kernels::all_here() {
        assert_eq!(bits(&run(kernels)), bits(&expected), "{what} on {}", kernels.name);
    }
    expected
}

/// Stored bytes of a random matrix: sensible scales, any codes.
fn matrix_bytes(random: &mut Random, kind: StoredType, rows: usize, columns: usize) -> Vec<u8> {
    let half = |random: &mut Random| half::f16::from_f32(random.float() / 16.0).to_le_bytes();
    let mut bytes = Vec::new();
    for _ in 0..rows * columns / kind.block_values() {
        match kind {
            StoredType::F32 => bytes.extend(stored(&[random.float()], FloatType::F32)),
            StoredType::F16 => bytes.extend(stored(&[random.float()], FloatType::F16)),
            StoredType::Bf16 => bytes.extend(stored(&[random.float()], FloatType::Bf16)),
            StoredType::Q8_0 => {
                bytes.extend(half(random));
                bytes.extend((0..32).map(|_| random.next() as u8));
            }
            StoredType::Q4_1 => {
                bytes.extend(half(random));
                bytes.extend(half(random));
                bytes.extend((0..16).map(|_| random.next() as u8));
            }
        }
    }
    bytes
}

/// ggml's formulas, straight from a stored row.
fn dequantised(kind: StoredType, row: &[u8]) -> Vec<f64> {
    let half = |block: &[u8], at: usize| half::f16::from_le_bytes([block[at], block[at + 1]]).to_f64();
    let block = |block: &[u8]| match kind {
        StoredType::F32 => vec![f64::from(f32::from_le_bytes([block[0], block[1], block[2], block[3]]))],
        StoredType::F16 => vec![half(block, 0)],
        StoredType::Bf16 => vec![half::bf16::from_le_bytes([block[0], block[1]]).to_f64()],
        StoredType::Q8_0 => (0..32).map(|i| half(block, 0) * f64::from(block[2 + i] as i8)).collect(),
        StoredType::Q4_1 => {
            let code = |i: usize| if i < 16 { block[4 + i] & 15 } else { block[4 + i - 16] >> 4 };
            (0..32).map(|i| half(block, 0) * f64::from(code(i)) + half(block, 2)).collect()
        }
    };
    row.chunks_exact(kind.block_bytes()).flat_map(block).collect()
}

fn gemm(kernels: &Kernels, view: &MatrixView<'_>, panels: &[u8], x: &[f32], rows: usize) -> Vec<f32> {
    timed_gemm(kernels, view, panels, x, rows).0
}

/// The products, and how long the kernel took.
fn timed_gemm(kernels: &Kernels, view: &MatrixView<'_>, panels: &[u8], x: &[f32], rows: usize) -> (Vec<f32>, Duration) {
    let k = view.columns;
    let tiles = placed(&tiles(rows, kernels.row_tiles), k);
    let mut packed = vec![0.0; packed_floats(&tiles, k)];
    for tile in &tiles {
        for (r, column) in (0..tile.valid).flat_map(|r| (0..k).map(move |column| (r, column))) {
            packed[tile.offset + column * tile.rows + r] = x[(tile.first_row + r) * k + column];
        }
    }
    let count = view.rows.div_ceil(LANES);
    let mut y = vec![f32::NAN; rows * count * LANES];
    let item = GemmItem {
        packing: view.stored,
        panels: panels.as_ptr(),
        panel_bytes: panel_bytes(view.stored, k),
        panel_count: count,
        k,
        tiles: &tiles,
        x: packed.as_ptr(),
        y: y.as_mut_ptr(),
        y_stride: count * LANES,
    };
    let start = Instant::now();
    // SAFETY: all buffers are as large as the item says.
    unsafe { (kernels.gemm)(&item) };
    let time = start.elapsed();
    (y.chunks_exact(count * LANES).flat_map(|row| row[..view.rows].to_vec()).collect(), time)
}

#[test]
fn products_are_right_and_do_not_depend_on_the_tile() {
    let mut random = Random::new(7);
    for kind in StoredType::ALL {
        // Not a multiple of sixteen outputs; six panels, so that wide and narrow steps both occur.
        let (outputs, k) = (93, 96);
        let bytes = matrix_bytes(&mut random, kind, outputs, k);
        let view = MatrixView { stored: kind, rows: outputs, columns: k, order: RowOrder::Natural, bytes: &bytes };
        let size = panel_bytes(kind, k);
        let mut panels = vec![0; outputs.div_ceil(LANES) * size];
        panels.chunks_exact_mut(size).enumerate().for_each(|(panel, to)| pack_panel(&view, panel, to));
        let weights: Vec<Vec<f64>> = (0..outputs).map(|o| dequantised(kind, view.row(o).unwrap())).collect();
        for (o, weights) in weights.iter().enumerate() {
            let mut row = vec![0.0; k];
            unpack_row(kind, &panels[o / LANES * size..][..size], o % LANES, &mut row);
            assert_close(&row, weights, &format!("{kind:?} output {o}"));
        }
        let rows = 57;
        let x = random.floats(rows * k);
        let dot = |row: &[f32], w: &[f64]| row.iter().zip(w).map(|(x, w)| f64::from(*x) * w).sum::<f64>();
        let expected: Vec<f64> = x.chunks_exact(k).flat_map(|row| weights.iter().map(move |w| dot(row, w))).collect();
        let all = on_all(&format!("{kind:?}"), |kernels| gemm(kernels, &view, &panels, &x, rows));
        assert_close(&all, &expected, &format!("{kind:?}"));
        for count in 1..rows {
            let some = gemm(Kernels::for_this_machine(), &view, &panels, &x[..count * k], count);
            assert_eq!(bits(&some), bits(&all[..count * outputs]), "{kind:?} {count} rows");
        }
    }
}

/// Sums that do not stay in registers double the time of the largest tile, and nothing else shows it.
#[test]
fn many_rows_cost_no_more_each_than_few() {
    let (outputs, k) = (64, 576);
    let bytes = matrix_bytes(&mut Random::new(23), StoredType::Q4_1, outputs, k);
    let size = panel_bytes(StoredType::Q4_1, k);
    let view =
        MatrixView { stored: StoredType::Q4_1, rows: outputs, columns: k, order: RowOrder::Natural, bytes: &bytes };
    let mut panels = vec![0; outputs / LANES * size];
    panels.chunks_exact_mut(size).enumerate().for_each(|(panel, to)| pack_panel(&view, panel, to));
    let kernels = Kernels::for_this_machine();
    // The best of many short runs: what else the machine does cannot make a run faster.
    let [few, many] = [kernels.row_tiles[kernels.row_tiles.len() / 2], kernels.row_tiles[0]].map(|rows| {
        let x = vec![0.5; rows * k];
        let times = (0..300).map(|_| timed_gemm(kernels, &view, &panels, &x, rows).1);
        times.min().unwrap().as_secs_f64() / rows as f64
    });
    assert!(many < 1.1 * few, "{}: a row costs {few} s among few and {many} s among many", kernels.name);
}

#[test]
fn rows_of_interleaved_heads_come_out_in_natural_order() {
    let (heads, head_dim) = (2, 8);
    let bytes: Vec<u8> = (0..heads * head_dim).flat_map(|row| (row as f32).to_le_bytes()).collect();
    let order = RowOrder::PairsTogether { head_dim };
    let view = MatrixView { stored: StoredType::F32, rows: heads * head_dim, columns: 1, order, bytes: &bytes };
    let found: Vec<f64> =
        (0..heads * head_dim).map(|o| dequantised(StoredType::F32, view.row(o).unwrap())[0]).collect();
    let first = [0., 2., 4., 6., 1., 3., 5., 7.];
    assert_eq!(found[..8], first);
    assert_eq!(found[8..], first.map(|row| row + 8.0));
    assert!(view.row(heads * head_dim).is_none());
}

#[test]
fn low_rank_deltas_are_right_at_every_rank_and_row_count() {
    let mut random = Random::new(11);
    for float in [FloatType::F32, FloatType::F16, FloatType::Bf16] {
        for (rank, rows) in [(1, 1), (3, 2), (4, 4), (7, 5), (16, 9), (31, 3), (100, 6)] {
            let what = format!("{float:?} rank {rank} rows {rows}");
            let (k, outputs) = (80, 96);
            let (a, b) = (random.floats(rank * k), random.floats(rank * outputs));
            let (x, y) = (random.floats(rows * k), random.floats(rows * outputs));
            let (a_stored, b_stored) = (stored(&a, float), stored(&b, float));
            let element = float.bytes() as usize;
            let pointers = |bytes: &[u8], width: usize| -> Vec<RowPtr> {
                bytes.chunks_exact(width * element).map(|row| RowPtr(row.as_ptr())).collect()
            };
            let (a_rows, b_rows) = (pointers(&a_stored, k), pointers(&b_stored, outputs));
            let found = on_all(&what, |kernels| {
                let (mut t, mut y) = (vec![0.0; rows * rank], y.clone());
                let (x, t) = (x.as_ptr(), t.as_mut_ptr());
                let shrink = ShrinkItem { element: float, a: &a_rows, k, x, x_stride: k, rows, t, t_stride: rank };
                let expand = ExpandItem {
                    element: float,
                    b: &b_rows,
                    first_column: 0,
                    vectors: outputs / LANES,
                    scale: 0.75,
                    t,
                    t_stride: rank,
                    rows,
                    y: y.as_mut_ptr(),
                    y_stride: outputs,
                };
                // SAFETY: all buffers are as large as the items say.
                unsafe {
                    (kernels.shrink)(&shrink);
                    (kernels.expand)(&expand);
                }
                y
            });
            let width = |bytes: &[u8]| -> Vec<f64> {
                let kind = [StoredType::F32, StoredType::F16, StoredType::Bf16][float as usize];
                dequantised(kind, bytes)
            };
            let (a, b) = (width(&a_stored), width(&b_stored));
            let mut expected: Vec<f64> = y.iter().map(|y| f64::from(*y)).collect();
            for row in 0..rows {
                for j in 0..rank {
                    let t: f64 = (0..k).map(|i| a[j * k + i] * f64::from(x[row * k + i])).sum();
                    (0..outputs).for_each(|o| expected[row * outputs + o] += 0.75 * b[j * outputs + o] * t);
                }
            }
            assert_close(&found, &expected, &what);
        }
    }
}

#[test]
fn attention_reads_its_own_prefix_and_nothing_else() {
    let mut random = Random::new(13);
    for (head_dim, positions) in [(16, vec![0]), (64, vec![14, 15, 16]), (80, vec![3, 40, 41, 42, 43, 44, 45])] {
        let last = *positions.iter().max().unwrap();
        let groups = last / LANES + 1;
        let size = 2 * head_dim * LANES;
        let (keys, values) = (random.floats((last + 1) * head_dim), random.floats((last + 1) * head_dim));
        // What nobody has written yet is no number.
        let mut pages = vec![f32::NAN; groups * size];
        for (t, d) in (0..=last).flat_map(|t| (0..head_dim).map(move |d| (t, d))) {
            let group = t / LANES * size;
            pages[group + d * LANES + t % LANES] = keys[t * head_dim + d];
            pages[group + head_dim * LANES + t % LANES * head_dim + d] = values[t * head_dim + d];
        }
        let q = random.floats(positions.len() * head_dim);
        let pointers: Vec<GroupPtr> = pages.chunks_exact_mut(size).map(|group| GroupPtr(group.as_mut_ptr())).collect();
        let run = |kernels: &Kernels, which: &[usize]| {
            let mut out = vec![0.0; which.len() * head_dim];
            let queries: Vec<Query> = which
                .iter()
                .zip(out.chunks_exact_mut(head_dim))
                .map(|(i, out)| Query { q: q[i * head_dim..].as_ptr(), out: out.as_mut_ptr(), position: positions[*i] })
                .collect();
            let mut scores = vec![0.0; which.len() * groups * LANES];
            let item = AttentionItem {
                queries: &queries,
                head_dim,
                scale: 0.3,
                groups: &pointers,
                offset: 0,
                values: head_dim * LANES,
                scores: scores.as_mut_ptr(),
                scores_stride: groups * LANES,
            };
            // SAFETY: all buffers are as large as the item says.
            unsafe { (kernels.attention)(&item) };
            out
        };
        let all: Vec<usize> = (0..positions.len()).collect();
        let found = on_all(&format!("attention {head_dim}"), |kernels| run(kernels, &all));
        let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
        for (i, position) in positions.iter().enumerate() {
            let query = &q[i * head_dim..][..head_dim];
            let scores: Vec<f64> = (0..=*position)
                .map(|t| (0.3_f32 as f64 * dot(query, &keys[t * head_dim..][..head_dim])).exp())
                .collect();
            let total: f64 = scores.iter().sum();
            let expected: Vec<f64> = (0..head_dim)
                .map(|d| scores.iter().enumerate().map(|(t, s)| s / total * f64::from(values[t * head_dim + d])).sum())
                .collect();
            let found = &found[i * head_dim..][..head_dim];
            assert_close(found, &expected, &format!("attention {head_dim} at {position}"));
            assert_eq!(bits(&run(Kernels::for_this_machine(), &[i])), bits(found), "alone at {position}");
        }
    }
}

#[test]
fn norm_gate_and_rotation_are_right() {
    let mut random = Random::new(17);
    let n = 96;
    let (x, delta, weight) = (random.floats(n), random.floats(n), random.floats(n));
    let normed = on_all("norm", |kernels| {
        let (mut x, mut out) = (x.clone(), vec![0.0; n]);
        let item = NormItem {
            x: x.as_mut_ptr(),
            delta: delta.as_ptr(),
            weight: weight.as_ptr(),
            out: out.as_mut_ptr(),
            n,
            epsilon: 1e-5,
        };
        // SAFETY: all buffers hold `n`.
        unsafe { (kernels.norm)(&item) };
        out
    });
    let sum: Vec<f64> = x.iter().zip(&delta).map(|(x, d)| f64::from(*x) + f64::from(*d)).collect();
    let root = (sum.iter().map(|x| x * x).sum::<f64>() / n as f64 + 1e-5).sqrt();
    let expected: Vec<f64> = sum.iter().zip(&weight).map(|(x, w)| x / root * f64::from(*w)).collect();
    assert_close(&normed, &expected, "norm");

    let (gate, up): (Vec<f32>, Vec<f32>) = (0..n).map(|i| (i as f32 * 2.0 - 95.0, random.float())).unzip();
    let gated = on_all("gate", |kernels| {
        let mut gate = gate.clone();
        // SAFETY: both hold `n`.
        unsafe { (kernels.gate)(&GateItem { gate: gate.as_mut_ptr(), up: up.as_ptr(), n }) };
        gate
    });
    let silu = |g: f64| g / (1.0 + (-g).exp());
    let expected: Vec<f64> = gate.iter().zip(&up).map(|(g, u)| silu(f64::from(*g)) * f64::from(*u)).collect();
    for (found, expected) in gated.iter().zip(&expected) {
        assert!((f64::from(*found) - expected).abs() <= 1e-6 * expected.abs() + 1e-30, "{found} for {expected}");
    }

    // A half that is no multiple of sixteen takes the scalar tail too.
    for dim in [16, 80] {
        let (head, angles) = (random.floats(dim), random.floats(dim / 2));
        let (cos, sin): (Vec<f32>, Vec<f32>) = angles.iter().map(|angle| (angle.cos(), angle.sin())).unzip();
        let rotated = on_all("rotate", |kernels| {
            let mut head = head.clone();
            let item = RotateItem { head: head.as_mut_ptr(), cos: cos.as_ptr(), sin: sin.as_ptr(), dim };
            // SAFETY: as long as `dim` says.
            unsafe { (kernels.rotate)(&item) };
            head
        });
        let half = dim / 2;
        let at = |i: usize| f64::from(head[i]);
        let expected: Vec<f64> = (0..dim)
            .map(|i| {
                let (c, s) = (f64::from(cos[i % half]), f64::from(sin[i % half]));
                if i < half { at(i) * c - at(i + half) * s } else { at(i) * c + at(i - half) * s }
            })
            .collect();
        assert_close(&rotated, &expected, "rotate");
    }
}

#[test]
fn what_has_overflowed_does_not_look_well_again() {
    for kernels in Kernels::all_here() {
        let mut gate = [0.0f32; LANES];
        gate[..6].copy_from_slice(&[f32::NAN, f32::NEG_INFINITY, f32::INFINITY, -1e38, 1e38, -100.0]);
        let up = [1.0f32; LANES];
        let item = GateItem { gate: gate.as_mut_ptr(), up: up.as_ptr(), n: LANES };
        // SAFETY: both hold one vector.
        unsafe { (kernels.gate)(&item) };
        // As in f32 by the formula: minus infinity times zero is none, a large negative number times zero is zero.
        assert!(gate[0].is_nan() && gate[1].is_nan(), "{}: {gate:?}", kernels.name);
        assert_eq!(gate[2..5], [f32::INFINITY, 0.0, 1e38], "{}", kernels.name);
        assert!(gate[5] <= 0.0 && gate[5] > -1e-36, "{}: {gate:?}", kernels.name);

        // The second of three keys is none: whoever sees it gets none, and the first token does not see it.
        let (head_dim, mut group) = (16, vec![0.5f32; 2 * 16 * LANES]);
        (0..head_dim).for_each(|d| group[d * LANES + 1] = f32::NAN);
        let (q, mut out) = (vec![1.0; head_dim], vec![0.0; 2 * head_dim]);
        let outs = out.chunks_exact_mut(head_dim).zip([0, 2]);
        let queries: Vec<Query> =
            outs.map(|(out, position)| Query { q: q.as_ptr(), out: out.as_mut_ptr(), position }).collect();
        let mut scores = [0.0; 2 * LANES];
        let item = AttentionItem {
            queries: &queries,
            head_dim,
            scale: 1.0,
            groups: &[GroupPtr(group.as_mut_ptr())],
            offset: 0,
            values: head_dim * LANES,
            scores: scores.as_mut_ptr(),
            scores_stride: LANES,
        };
        // SAFETY: all buffers are as large as the item says.
        unsafe { (kernels.attention)(&item) };
        assert_eq!(out[..head_dim], [0.5; 16], "{}", kernels.name);
        assert!(out[head_dim..].iter().all(|value| value.is_nan()), "{}: {out:?}", kernels.name);
    }
}
