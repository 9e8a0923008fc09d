//! Work lists of the decode kernel: which CTA shrinks which inputs and expands which outputs of which segment. Pure.
//!
//! Segments are cut into pieces of at most eight rows. Where there are no more pieces than CTAs, a piece gets whole CTAs
//! of its own, so that it waits for nobody else; where that would leave CTAs idle, pieces are laid end to end over all
//! CTAs and cut at their borders.

use super::layout::{RANK_MAX, tiles};
use super::{BLOCK_INPUTS, PIECE_ROWS, SLICES, UNIT_OUTPUTS};
use crate::plain::plain;
use crate::tuning::DecodeTuning;

/// Runs that a block holds itself; more go to the overflow list.
pub const BLOCK_RUNS: usize = 3;
/// Runs of one CTA.
pub const RUNS_MAX: usize = 64;
/// Of them shrinks.
const SHRINKS_MAX: usize = 24;
/// Pieces of one launch.
pub const PIECES_MAX: usize = 4096;

/// Rows of one adapter that stand side by side in the list of rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Index of the resident adapter in the table of tensors.
    pub slot: u32,
    /// First entry of the list of rows.
    pub row0: u32,
    pub rows: u32,
    /// The highest rank among the adapter's tensors that this plan is used for.
    pub rank: u32,
}

/// Projections that share an input.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    pub inputs: u32,
    /// One to three.
    pub outputs: Vec<u32>,
}

plain! {
    /// One piece of work. Names as in `cuda/lora_decode.cu`.
    pub struct Run {
        pub slot: u32,
        pub row0: u32,
        pub rows: u32,
        pub from: u32,
        pub count: u32,
        pub exchange: u32,
        pub stride: u32,
        pub splits: u32,
    }
}

plain! {
    /// One CTA's work: first its shrinks, then its expands.
    pub struct Block {
        pub shrinks: u32,
        pub expands: u32,
        /// First run of the overflow list.
        pub overflow: u32,
        pub unused: [u32; 5],
        pub runs: [Run; BLOCK_RUNS],
    }
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct DecodePlan {
    /// One for each CTA of the grid, idle ones too.
    pub blocks: Vec<Block>,
    pub overflow: Vec<Run>,
    /// Columns of one half of the exchange buffer that are used, 1 KiB each.
    pub exchange_columns: u32,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    #[error("a group has {found} projections; it can have 1 to {SLICES}")]
    Slices { found: usize },
    #[error("segment {segment} has rank {rank}, above {most}")]
    Rank { segment: usize, rank: u32, most: u32 },
    #[error("the batch has {found} pieces of {PIECE_ROWS} rows; at most {PIECES_MAX}")]
    Pieces { found: usize },
    #[error("the batch has {found} tiles of rows; at most {most}")]
    Tiles { found: usize, most: usize },
    #[error("the work is for {ctas} CTAs of a grid of {grid}")]
    Grid { ctas: u32, grid: u32 },
    #[error("{found} {what} are not a multiple of {of}")]
    Multiple { what: &'static str, found: u32, of: u32 },
    #[error("{ctas} CTAs cannot hold the runs of {pieces} pieces")]
    Ctas { ctas: u32, pieces: usize },
}

#[derive(Clone, Copy, Debug)]
struct Piece {
    slot: u32,
    row0: u32,
    rows: u32,
    /// Of one split.
    columns: u32,
    /// Cost of the whole shrink and the whole expand, in bytes of memory traffic.
    shrink: f64,
    expand: f64,
}

/// A part of a piece: `from..from + count` blocks or units, on one CTA.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Part {
    piece: usize,
    cta: u32,
    from: u32,
    count: u32,
}

/// The work lists of one launch. Empty segments and those of rank 0 take no part.
pub fn plan_decode(segments: &[Segment], group: &Group, tuning: &DecodeTuning) -> Result<DecodePlan, PlanError> {
    if group.outputs.is_empty() || group.outputs.len() > SLICES {
        return Err(PlanError::Slices { found: group.outputs.len() });
    }
    if tuning.ctas == 0 || tuning.ctas > tuning.grid {
        return Err(PlanError::Grid { ctas: tuning.ctas, grid: tuning.grid });
    }
    let pieces = cut_segments(segments, group)?;
    let size = Size {
        blocks: group.inputs.div_ceil(BLOCK_INPUTS),
        units: group.outputs.iter().map(|n| n.div_ceil(UNIT_OUTPUTS)).sum(),
    };
    let (shrinks, expands) = match aligned(&pieces, tuning) {
        Some(ctas) => lay_aligned(&pieces, &ctas, &size, tuning),
        None => lay_ragged(&pieces, &size, tuning),
    };
    fill(&pieces, &shrinks, &expands, tuning)
}

struct Size {
    blocks: u32,
    units: u32,
}

fn cut_segments(segments: &[Segment], group: &Group) -> Result<Vec<Piece>, PlanError> {
    let outputs: u32 = group.outputs.iter().sum();
    let mut pieces = Vec::new();
    for (index, segment) in segments.iter().enumerate() {
        if segment.rank > RANK_MAX {
            return Err(PlanError::Rank { segment: index, rank: segment.rank, most: RANK_MAX });
        }
        if segment.rank == 0 || segment.rows == 0 {
            continue;
        }
        let count = segment.rows.div_ceil(PIECE_ROWS);
        let stored = f64::from(segment.rank.next_multiple_of(8)) * 2.0;
        for i in 0..count {
            // As even as can be: 9 rows are 5 and 4.
            let border = |i: u32| (u64::from(segment.rows) * u64::from(i) / u64::from(count)) as u32;
            let rows = border(i + 1) - border(i);
            pieces.push(Piece {
                slot: segment.slot,
                row0: segment.row0 + border(i),
                rows,
                columns: group.outputs.len() as u32 * tiles(segment.rank),
                shrink: f64::from(group.inputs) * (stored * group.outputs.len() as f64 + 2.0 * f64::from(rows)),
                expand: f64::from(outputs) * (stored + 4.0 * f64::from(rows)),
            });
        }
        if pieces.len() > PIECES_MAX {
            return Err(PlanError::Pieces { found: pieces.len() });
        }
    }
    Ok(pieces)
}

/// How many CTAs each piece gets for itself; nothing where laying pieces end to end is faster.
fn aligned(pieces: &[Piece], tuning: &DecodeTuning) -> Option<Vec<u32>> {
    let total: f64 = pieces.iter().map(|p| p.shrink + p.expand).sum();
    if pieces.is_empty() {
        return Some(Vec::new());
    }
    if pieces.len() > tuning.ctas as usize {
        return None;
    }
    let fair = total / f64::from(tuning.ctas);
    let mut ctas: Vec<u32> =
        pieces.iter().map(|p| (((p.shrink + p.expand) / fair) as u32).clamp(1, tuning.ctas_per_piece)).collect();
    let mut used: u32 = ctas.iter().sum();
    let load = |i: usize, ctas: &[u32]| (pieces[i].shrink + pieces[i].expand) / f64::from(ctas[i]);
    // One more for the slowest, as long as there are any. A piece that cannot grow is as fast as it gets.
    while used < tuning.ctas {
        let growing = (0..pieces.len()).filter(|i| ctas[*i] < tuning.ctas_per_piece);
        let Some(slowest) = growing.max_by(|a, b| load(*a, &ctas).total_cmp(&load(*b, &ctas)).then(b.cmp(a))) else {
            break;
        };
        // Pieces that are alike stay alike: growing one of them would not make the slowest faster.
        let alike = (0..pieces.len()).filter(|i| load(*i, &ctas) >= load(slowest, &ctas) * 0.999).count() as u32;
        if used + alike > tuning.ctas {
            break;
        }
        ctas[slowest] += 1;
        used += 1;
    }
    while used > tuning.ctas {
        let fastest =
            (0..pieces.len()).filter(|i| ctas[*i] > 1).min_by(|a, b| load(*a, &ctas).total_cmp(&load(*b, &ctas)))?;
        ctas[fastest] -= 1;
        used -= 1;
    }
    let slowest = (0..pieces.len()).map(|i| load(i, &ctas)).fold(0.0, f64::max);
    (slowest <= fair * tuning.ragged_above || pieces.len() == 1).then_some(ctas)
}

fn lay_aligned(pieces: &[Piece], ctas: &[u32], size: &Size, tuning: &DecodeTuning) -> (Vec<Part>, Vec<Part>) {
    let (mut shrinks, mut expands, mut first) = (Vec::new(), Vec::new(), 0);
    for (i, (piece, count)) in pieces.iter().zip(ctas.iter().copied()).enumerate() {
        let splits = count.min(tuning.splits).min(size.blocks).max(1);
        for s in 0..splits {
            let from = size.blocks * s / splits;
            // Spread over the piece's CTAs, so that shrinks run on as many SMs as can be.
            shrinks.push(Part {
                piece: i,
                cta: first + s * count / splits,
                from,
                count: size.blocks * (s + 1) / splits - from,
            });
        }
        // What a CTA has to shrink it need not expand.
        let fair = (piece.shrink + piece.expand) / f64::from(count);
        let shrinking = |k: u32| (0..splits).any(|s| s * count / splits == k);
        let room: Vec<f64> = (0..count)
            .map(|k| if shrinking(k) { (fair - piece.shrink / f64::from(splits)).max(0.0) } else { fair })
            .collect();
        let all: f64 = room.iter().sum();
        let (mut sum, mut from) = (0.0, 0);
        for (k, r) in (0..).zip(&room) {
            sum += r;
            let share = if all > 0.0 { sum / all } else { f64::from(k + 1) / f64::from(count) };
            let to = if k + 1 == count { size.units } else { (f64::from(size.units) * share).round() as u32 };
            if to > from {
                expands.push(Part { piece: i, cta: first + k, from, count: to - from });
                from = to;
            }
        }
        first += count;
    }
    (shrinks, expands)
}

fn lay_ragged(pieces: &[Piece], size: &Size, tuning: &DecodeTuning) -> (Vec<Part>, Vec<Part>) {
    let even = vec![1.0; tuning.ctas as usize];
    let shrinks = cut(pieces.iter().map(|p| p.shrink), size.blocks, &even, SHRINKS_MAX);
    let mut load = vec![0.0; tuning.ctas as usize];
    for part in &shrinks {
        load[part.cta as usize] += pieces[part.piece].shrink * f64::from(part.count) / f64::from(size.blocks);
    }
    let fair = pieces.iter().map(|p| p.shrink + p.expand).sum::<f64>() / f64::from(tuning.ctas);
    let room: Vec<f64> = load.iter().map(|l| (fair - l).max(fair * 0.01)).collect();
    (shrinks, cut(pieces.iter().map(|p| p.expand), size.units, &room, RUNS_MAX - SHRINKS_MAX))
}

/// Lays pieces of `steps` steps end to end and cuts them where a CTA's share of `room` ends, at whole steps.
fn cut(costs: impl Iterator<Item = f64> + Clone, steps: u32, room: &[f64], runs_max: usize) -> Vec<Part> {
    // A run has a cost of its own, however small its piece; this also keeps a CTA's runs few.
    let least = costs.clone().sum::<f64>() / (room.len() * 12) as f64;
    let costs = costs.map(|c| c.max(least));
    let scale = costs.clone().sum::<f64>() / room.iter().sum::<f64>();
    let (mut parts, mut cta, mut end, mut at): (Vec<Part>, _, _, _) = (Vec::new(), 0, room[0] * scale, 0.0);
    let mut runs = 0;
    for (piece, cost) in costs.enumerate() {
        let (step, mut from) = (cost / f64::from(steps), 0);
        while from < steps {
            let fits = ((end - at) / step).round().clamp(0.0, f64::from(steps - from)) as u32;
            let last = cta + 1 == room.len();
            if !last && (fits == 0 || runs == runs_max) {
                cta += 1;
                end += room[cta] * scale;
                runs = 0;
                continue;
            }
            let count = if last { steps - from } else { fits };
            parts.push(Part { piece, cta: cta as u32, from, count });
            at += step * f64::from(count);
            from += count;
            runs += 1;
        }
    }
    parts
}

fn fill(pieces: &[Piece], shrinks: &[Part], expands: &[Part], tuning: &DecodeTuning) -> Result<DecodePlan, PlanError> {
    let mut splits = vec![0u32; pieces.len()];
    shrinks.iter().for_each(|part| splits[part.piece] += 1);
    let mut first = Vec::with_capacity(pieces.len());
    let mut columns = 0;
    for (piece, n) in pieces.iter().zip(&splits) {
        first.push(columns);
        columns += piece.columns * n;
    }
    let run = |part: &Part, exchange: u32| {
        let piece = &pieces[part.piece];
        Run {
            slot: piece.slot,
            row0: piece.row0,
            rows: piece.rows,
            from: part.from,
            count: part.count,
            exchange,
            stride: piece.columns,
            splits: splits[part.piece],
        }
    };
    let mut lists: Vec<(Vec<Run>, Vec<Run>)> = vec![Default::default(); tuning.grid as usize];
    let mut next = first.clone();
    for part in shrinks {
        lists[part.cta as usize].0.push(run(part, next[part.piece]));
        next[part.piece] += pieces[part.piece].columns;
    }
    expands.iter().for_each(|part| lists[part.cta as usize].1.push(run(part, first[part.piece])));

    let mut plan = DecodePlan { exchange_columns: columns, ..DecodePlan::default() };
    for (shrinks, expands) in lists {
        if shrinks.len() + expands.len() > RUNS_MAX {
            return Err(PlanError::Ctas { ctas: tuning.ctas, pieces: pieces.len() });
        }
        let mut block = Block {
            shrinks: shrinks.len() as u32,
            expands: expands.len() as u32,
            overflow: plan.overflow.len() as u32,
            ..Block::default()
        };
        for (i, run) in shrinks.into_iter().chain(expands).enumerate() {
            match block.runs.get_mut(i) {
                Some(place) => *place = run,
                None => plan.overflow.push(run),
            }
        }
        plan.blocks.push(block);
    }
    Ok(plan)
}

#[cfg(test)]
#[path = "plan_tests.rs"]
mod tests;
