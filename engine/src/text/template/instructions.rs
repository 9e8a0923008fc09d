//! Makes the instructions of a compiled template pay for all that they do.
//!
//! minijinja's fuel pays for the data that a template makes, but not for what a value comes to when it is written out,
//! compared or looked up: a list that holds itself twice, and that one twice again, is short to make and endless to write.
//! Nor does it look at how deep values are nested: dropping one that is nested deep enough takes more stack than there is.
//! So the instructions that do such things are replaced by filters of ours, in [`paid`], that pay first; their names are
//! none that a template can write.
//!
//! [`paid`]: super::paid

use std::borrow::Cow;

use minijinja::machinery::{Instruction, Instructions};

use super::paid;

/// No place in the interpreter's cache of filters: the names are new.
const UNCACHED: u8 = u8::MAX;

/// The same template, with instructions that pay.
///
/// # Errors
/// What it does that cannot be paid for.
pub(super) fn paying(compiled: &Instructions<'static>) -> Result<Instructions<'static>, String> {
    let mut made: Vec<(u32, Instruction<'static>)> = Vec::new();
    // Where each instruction begins now; one more, for jumps behind the last.
    let mut begins = Vec::new();
    for index in 0.. {
        begins.push(made.len() as u32);
        let Some(instruction) = compiled.get(index) else { break };
        made.extend(instead_of(instruction)?.into_iter().map(|instruction| (index, instruction)));
    }
    let moved = |target: u32| begins.get(target as usize).copied().unwrap_or(made.len() as u32);
    let mut paying = Instructions::new(compiled.name(), compiled.source());
    for (index, instruction) in &made {
        let instruction = aimed(instruction.clone(), moved);
        // Lines are for people who read what is wrong with their template.
        match compiled.get_line(*index) {
            Some(line) => paying.add_with_line(instruction, u16::try_from(line).unwrap_or(u16::MAX)),
            None => paying.add(instruction),
        };
    }
    Ok(paying)
}

/// What is done in the place of one instruction.
fn instead_of(instruction: &Instruction<'static>) -> Result<Vec<Instruction<'static>>, String> {
    let filter = |name, arguments: u16| Instruction::ApplyFilter(name, Some(arguments), UNCACHED);
    Ok(match instruction {
        Instruction::StringConcat => vec![filter(paid::CONCAT, 2)],
        Instruction::Eq => vec![filter(paid::EQUAL, 2)],
        Instruction::Ne => vec![filter(paid::UNEQUAL, 2)],
        Instruction::Lt => vec![filter(paid::LESS, 2)],
        Instruction::Lte => vec![filter(paid::LESS_OR_EQUAL, 2)],
        Instruction::Gt => vec![filter(paid::GREATER, 2)],
        Instruction::Gte => vec![filter(paid::GREATER_OR_EQUAL, 2)],
        Instruction::In => vec![filter(paid::IN, 2)],
        Instruction::CompareAndPreserve(_) => return Err("chained comparisons are not supported".to_owned()),
        Instruction::GetItem => vec![filter(paid::ITEM, 2)],
        Instruction::BuildList(items) => vec![Instruction::ApplyFilter(paid::LIST, count(*items)?, UNCACHED)],
        Instruction::BuildTuple(items) => vec![Instruction::ApplyFilter(paid::TUPLE, count(*items)?, UNCACHED)],
        Instruction::BuildMap(pairs) => {
            vec![Instruction::ApplyFilter(paid::MAP, count(Some(pairs.saturating_mul(2)))?, UNCACHED)]
        }
        // Both are done when they are looked at, by a value round the value.
        Instruction::Slice | Instruction::Mul => vec![filter(paid::DEEPER, 1), instruction.clone()],
        Instruction::SetAttr(_) => {
            vec![Instruction::Swap, filter(paid::KEPT, 1), Instruction::Swap, instruction.clone()]
        }
        // It compares what it is given with what it was given before.
        Instruction::CallMethod("changed", Some(0..3)) => vec![filter(paid::WHOLE, 1), instruction.clone()],
        Instruction::CallMethod("changed", _) => return Err("loop.changed takes one value".to_owned()),
        Instruction::ApplyFilter(name, arguments, place) => {
            let known = paid::filter(&plain(name));
            let (name, place) = known.map_or((*name, *place), |paid| (paid, UNCACHED));
            vec![Instruction::ApplyFilter(name, *arguments, place)]
        }
        Instruction::PerformTest(name, arguments, place) => {
            let known = paid::test(&plain(name));
            let (name, place) = known.map_or((*name, *place), |paid| (paid, UNCACHED));
            vec![Instruction::PerformTest(name, *arguments, place)]
        }
        other => vec![other.clone()],
    })
}

fn count(items: Option<usize>) -> Result<Option<u16>, String> {
    let narrow =
        |items| u16::try_from(items).map_err(|_| format!("a literal holds {items} values, the limit is {}", u16::MAX));
    items.map(narrow).transpose()
}

/// A name as the interpreter looks it up.
fn plain(name: &str) -> Cow<'_, str> {
    if name.bytes().any(|byte| byte.is_ascii_whitespace()) {
        return name.chars().filter(|letter| !letter.is_ascii_whitespace()).collect();
    }
    name.into()
}

/// The instruction with its target where it lies now.
fn aimed(instruction: Instruction<'static>, moved: impl Fn(u32) -> u32) -> Instruction<'static> {
    match instruction {
        Instruction::Iterate(target) => Instruction::Iterate(moved(target)),
        Instruction::Jump(target) => Instruction::Jump(moved(target)),
        Instruction::JumpIfFalse(target) => Instruction::JumpIfFalse(moved(target)),
        Instruction::JumpIfFalseOrPop(target) => Instruction::JumpIfFalseOrPop(moved(target)),
        Instruction::JumpIfTrueOrPop(target) => Instruction::JumpIfTrueOrPop(moved(target)),
        Instruction::BuildMacro(name, target, flags) => Instruction::BuildMacro(name, moved(target), flags),
        other => other,
    }
}
