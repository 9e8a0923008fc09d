//! Which models have metric series of their own, at the gateway and in each engine. Pure.
//!
//! A pool may serve thousands of adapters, and each label value costs series in every scrape. The busiest have their own,
//! the others share `other`. A newcomer takes a place only if it is clearly busier than the least busy holder, and at most
//! one place changes per interval, so that series do not come and go with every request.

use std::collections::BTreeMap;

/// Label of the models without series of their own.
pub const OTHER: &str = "other";
/// Time between two changes of places.
const CHANGE_MS: u64 = 10_000;
/// Counts are halved this often, so that they speak of now.
const HALVE_MS: u64 = 60_000;
/// Models whose counts are kept, per place.
const COUNTED_PER_PLACE: usize = 16;

/// Who has a place.
#[derive(Debug)]
pub struct Top {
    places: usize,
    counts: BTreeMap<String, Count>,
    placed: usize,
    changed_ms: u64,
    halved_ms: u64,
}

#[derive(Debug, Default)]
struct Count {
    requests: u64,
    has_place: bool,
}

/// How to label one request, and whose series to remove because the place went to another.
#[derive(Debug, PartialEq, Eq)]
pub struct Labelled<'a> {
    pub label: &'a str,
    pub evicted: Option<String>,
}

impl Top {
    /// `places`: the most models with series of their own at a time.
    pub fn new(places: usize) -> Self {
        Self { places, counts: BTreeMap::new(), placed: 0, changed_ms: 0, halved_ms: 0 }
    }

    /// Counts a request for `model`.
    pub fn count<'a>(&mut self, model: &'a str, now_ms: u64) -> Labelled<'a> {
        self.halve(now_ms);
        let Some(requests) = self.add(model) else {
            return Labelled { label: OTHER, evicted: None };
        };
        if self.has_place(model) {
            return Labelled { label: model, evicted: None };
        }
        if self.placed < self.places {
            self.place(model, true);
            return Labelled { label: model, evicted: None };
        }
        let least = self.counts.iter().filter(|(_, count)| count.has_place).min_by_key(|(_, count)| count.requests);
        let Some((least, least_count)) = least.map(|(name, count)| (name.clone(), count.requests)) else {
            return Labelled { label: OTHER, evicted: None };
        };
        let settled = now_ms.saturating_sub(self.changed_ms) >= CHANGE_MS;
        if !settled || requests <= least_count.saturating_mul(2) {
            return Labelled { label: OTHER, evicted: None };
        }
        self.changed_ms = now_ms;
        self.place(&least, false);
        self.place(model, true);
        Labelled { label: model, evicted: Some(least) }
    }

    /// Label of a model that has been counted, without counting again.
    pub fn label<'a>(&self, model: &'a str) -> &'a str {
        if self.has_place(model) { model } else { OTHER }
    }

    /// Requests now counted for the model; `None` if too many models are counted already.
    fn add(&mut self, model: &str) -> Option<u64> {
        if !self.counts.contains_key(model) && self.counts.len() >= self.places * COUNTED_PER_PLACE {
            return None;
        }
        let count = self.counts.entry(model.to_owned()).or_default();
        count.requests = count.requests.saturating_add(1);
        Some(count.requests)
    }

    fn has_place(&self, model: &str) -> bool {
        self.counts.get(model).is_some_and(|count| count.has_place)
    }

    fn place(&mut self, model: &str, has_place: bool) {
        if let Some(count) = self.counts.get_mut(model) {
            count.has_place = has_place;
        }
        self.placed = self.counts.values().filter(|count| count.has_place).count();
    }

    fn halve(&mut self, now_ms: u64) {
        if now_ms.saturating_sub(self.halved_ms) < HALVE_MS {
            return;
        }
        self.halved_ms = now_ms;
        self.counts.retain(|_, count| {
            count.requests /= 2;
            count.has_place || count.requests > 0
        });
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn count(top: &mut Top, model: &str, times: u32, now_ms: u64) -> (String, Vec<String>) {
        let mut last = String::new();
        let mut evicted = Vec::new();
        for _ in 0..times {
            let labelled = top.count(model, now_ms);
            last = labelled.label.to_owned();
            evicted.extend(labelled.evicted);
        }
        (last, evicted)
    }

    #[test]
    fn places_go_to_the_busiest() {
        let mut top = Top::new(2);
        assert_eq!(count(&mut top, "a", 10, 0).0, "a");
        assert_eq!(count(&mut top, "b", 3, 0).0, "b");
        assert_eq!(count(&mut top, "c", 6, 20_000).0, OTHER, "twice as busy is not clearly busier");
        assert_eq!(count(&mut top, "c", 1, 20_000), ("c".to_owned(), vec!["b".to_owned()]));
        assert_eq!((top.label("a"), top.label("b"), top.label("c")), ("a", OTHER, "c"));
        assert_eq!(count(&mut top, "d", 50, 20_001).0, OTHER, "one change per interval");
        assert_eq!(count(&mut top, "d", 1, 30_000), ("d".to_owned(), vec!["c".to_owned()]));
    }

    #[test]
    fn old_traffic_is_forgotten() {
        let mut top = Top::new(1);
        count(&mut top, "old", 1_000, 0);
        let evicted = (1..=12).filter_map(|minute| top.count("new", minute * 60_000).evicted);
        assert_eq!(evicted.collect::<Vec<_>>(), ["old"]);
    }

    proptest! {
        /// However many models come: never more labels at once than places, and the memory stays bounded.
        #[test]
        fn labels_are_bounded(requests in prop::collection::vec((0..200_u32, 0..20_000_u64), 0..600), places in 1..6_usize) {
            let mut top = Top::new(places);
            let mut shown = std::collections::BTreeSet::new();
            let mut now_ms = 0;
            for (model, pause_ms) in requests {
                now_ms += pause_ms;
                let model = model.to_string();
                let labelled = top.count(&model, now_ms);
                if let Some(evicted) = &labelled.evicted {
                    prop_assert!(shown.remove(evicted));
                }
                if labelled.label != OTHER {
                    shown.insert(labelled.label.to_owned());
                }
                prop_assert!(shown.len() <= places);
                prop_assert_eq!(top.label(&model), labelled.label);
                prop_assert!(top.counts.len() <= places * COUNTED_PER_PLACE);
            }
        }
    }
}
