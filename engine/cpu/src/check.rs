//! Whether a batch keeps its contract. Pure; what it refuses is a bug of the scheduler.

use std::collections::{BTreeMap, BTreeSet};

use lorafleet_backend::batch::{Batch, PageBudget, PageId, ResidentId, Segment, Upload};
use lorafleet_backend::model::Shape;

use super::resident::Resident;

/// What is known when a batch comes.
pub struct Known<'a> {
    pub shape: &'a Shape,
    pub budget: PageBudget,
    pub residents: &'a BTreeMap<ResidentId, Resident>,
    /// For each page the adapter that holds it.
    pub holders: &'a [Option<ResidentId>],
    pub last_step: Option<u64>,
}

/// # Errors
/// The first broken rule, with the ids and numbers.
pub fn check(batch: &Batch, known: &Known<'_>) -> Result<(), String> {
    if known.last_step.is_some_and(|last| batch.step <= last) {
        return Err(format!("the last step was {:?}", known.last_step));
    }
    let dropped: BTreeSet<ResidentId> = batch.drops.iter().copied().collect();
    if let Some(id) = dropped.iter().find(|id| !known.residents.contains_key(id)) {
        return Err(format!("drops {id:?}, which is not resident"));
    }
    let mut coming: BTreeMap<PageId, ResidentId> = BTreeMap::new();
    let mut uploaded: BTreeSet<ResidentId> = BTreeSet::new();
    let staying = |page: PageId| {
        let holder = known.holders.get(page.0 as usize).copied().flatten();
        holder.filter(|holder| !dropped.contains(holder))
    };
    for upload in &batch.uploads {
        let id = upload.resident;
        if !uploaded.insert(id) {
            return Err(format!("uploads {id:?} again"));
        }
        check_part(upload, known.residents.get(&id).filter(|_| !dropped.contains(&id)))?;
        if upload.part.start > 0 {
            continue;
        }
        if let Some(page) = upload.pages.iter().find(|page| page.0 >= known.budget.pages) {
            return Err(format!("uploads to {page:?} of {} pages", known.budget.pages));
        }
        for page in &upload.pages {
            if let Some(other) = staying(*page).or(coming.insert(*page, id)) {
                return Err(format!("uploads {id:?} to {page:?}, which {other:?} holds"));
            }
        }
    }
    let ends = |upload: &Upload| upload.part.end as usize == upload.pages.len();
    let whole: BTreeSet<ResidentId> =
        batch.uploads.iter().filter(|upload| ends(upload)).map(|upload| upload.resident).collect();
    let there = |id: &ResidentId| known.residents.get(id).is_some_and(Resident::is_whole) && !dropped.contains(id);
    let resident = |id: &ResidentId| whole.contains(id) || there(id);
    let held = |page: &PageId| staying(*page).or(coming.get(page).copied());
    let mut sequences = BTreeSet::new();
    for segment in &batch.segments {
        if !sequences.insert(segment.sequence) {
            return Err(format!("{:?} has two segments", segment.sequence));
        }
        check_segment(segment, known, &resident, &held).map_err(|what| format!("{:?}: {what}", segment.sequence))?;
    }
    Ok(())
}

/// Whether a piece is the next one of its resident.
fn check_part(upload: &Upload, begun: Option<&Resident>) -> Result<(), String> {
    let (id, part, pages) = (upload.resident, &upload.part, upload.pages.len());
    if part.is_empty() || part.end as usize > pages {
        return Err(format!("uploads {part:?} of the {pages} pages of {id:?}"));
    }
    match begun {
        None if part.start == 0 => Ok(()),
        None => Err(format!("uploads {part:?} of {id:?}, which has not begun")),
        Some(resident) if part.start == 0 || resident.is_whole() => Err(format!("uploads {:?} again", id)),
        Some(resident) if part.start != resident.written() => {
            Err(format!("uploads {part:?} of {id:?}, of which {} pages are written", resident.written()))
        }
        Some(resident) if upload.pages != resident.pages => Err(format!("uploads {id:?} to other pages than before")),
        Some(_) => Ok(()),
    }
}

fn check_segment(
    segment: &Segment,
    known: &Known<'_>,
    resident: &dyn Fn(&ResidentId) -> bool,
    held: &dyn Fn(&PageId) -> Option<ResidentId>,
) -> Result<(), String> {
    if let Some(id) = segment.adapter.filter(|id| !resident(id)) {
        return Err(format!("{id:?} is not resident"));
    }
    if segment.tokens.is_empty() {
        return Err("no tokens".into());
    }
    if let Some(token) = segment.tokens.iter().find(|token| **token as usize >= known.shape.vocabulary) {
        return Err(format!("token {token} of a vocabulary of {}", known.shape.vocabulary));
    }
    let end = segment.position as usize + segment.tokens.len();
    if end > known.shape.context {
        return Err(format!("position {end} of a context of {}", known.shape.context));
    }
    let needed = end.div_ceil(known.budget.page_tokens as usize);
    let Some(pages) = segment.pages.get(..needed) else {
        return Err(format!("{} pages for {end} tokens, {needed} are needed", segment.pages.len()));
    };
    for page in pages {
        if page.0 >= known.budget.pages {
            return Err(format!("{page:?} of {} pages", known.budget.pages));
        }
        if let Some(adapter) = held(page) {
            return Err(format!("keys and values in {page:?}, which {adapter:?} holds"));
        }
    }
    Ok(())
}
