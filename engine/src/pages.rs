//! The one pool of pages: which are free, which hold an adapter, which hold keys and values, and for which tokens.
//!
//! A full page of keys and values is a node of a tree: its key is its parent node and the tokens in it, and the roots
//! are the base and each adapter's digest. So a page is found again only by the very same tokens under the very same
//! weights, and by comparison, never by a hash alone.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use lorafleet_artifact::Digest;
use lorafleet_backend::batch::PageId;

/// The digest that keys a sequence's KV: pages of one key are never read under another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum KvOwner {
    Base,
    Adapter(Digest),
}

/// A tree node's name. Never reused, so a stale name finds nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct NodeId(u64);

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Parent {
    Root(KvOwner),
    Node(NodeId),
}

#[derive(Clone, Debug)]
struct Node {
    id: NodeId,
    parent: Parent,
    parent_page: Option<PageId>,
    tokens: Box<[u32]>,
    children: u32,
    touched: u64,
}

#[derive(Clone, Debug)]
enum Use {
    Free,
    Adapter,
    /// `references` sequences read it; `node` once it is full and its tokens are computed.
    Kv {
        references: u32,
        node: Option<Node>,
    },
}

/// How the pool is used. `free + cached + used = total`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PageCounts {
    pub total: u32,
    pub free: u32,
    /// Full pages that no sequence reads now; taken back when pages run out.
    pub cached: u32,
    pub adapter: u32,
    pub kv: u32,
}

#[derive(Debug)]
pub struct Pages {
    page_tokens: u32,
    uses: Vec<Use>,
    free: Vec<PageId>,
    index: HashMap<(Parent, Box<[u32]>), PageId>,
    /// Cached leaves, least recently used first.
    evictable: BTreeSet<(u64, PageId)>,
    cached: u32,
    adapter: u32,
    clock: u64,
    next_node: u64,
}

impl Pages {
    pub fn new(total: u32, page_tokens: u32) -> Self {
        Self {
            page_tokens: page_tokens.max(1),
            uses: vec![Use::Free; total as usize],
            free: (0..total).rev().map(PageId).collect(),
            index: HashMap::new(),
            evictable: BTreeSet::new(),
            cached: 0,
            adapter: 0,
            clock: 0,
            next_node: 0,
        }
    }

    pub fn page_tokens(&self) -> u32 {
        self.page_tokens
    }

    pub fn counts(&self) -> PageCounts {
        let (total, free) = (self.uses.len() as u32, self.free.len() as u32);
        let kv = total - free - self.cached - self.adapter;
        PageCounts { total, free, cached: self.cached, adapter: self.adapter, kv }
    }

    /// Pages that `take_kv` or `take_adapter` can give without anybody else giving one up.
    pub fn available(&self) -> u32 {
        self.free.len() as u32 + self.cached
    }

    /// Pages that hold `tokens`, a page each, as far as they are known under `owner`; at most `pages_max`.
    pub fn find(&self, owner: KvOwner, tokens: &[u32], pages_max: usize) -> Vec<PageId> {
        let mut parent = Parent::Root(owner);
        let mut found = Vec::new();
        for chunk in tokens.chunks_exact(self.page_tokens as usize).take(pages_max) {
            let Some(page) = self.index.get(&(parent, Box::from(chunk))) else { break };
            let Some(node) = self.node(*page) else { break };
            parent = Parent::Node(node.id);
            found.push(*page);
        }
        found
    }

    /// How many of `pages` nobody reads now: retaining them makes that many fewer available.
    pub fn idle_among(&self, pages: &[PageId]) -> u32 {
        pages.iter().filter(|page| self.references(**page) == 0).count() as u32
    }

    /// How many of `pages` one reader alone holds: releasing them makes at least that many more available.
    pub fn sole_among(&self, pages: &[PageId]) -> u32 {
        pages.iter().filter(|page| self.references(**page) == 1).count() as u32
    }

    /// One more reader of each page.
    pub fn retain(&mut self, pages: &[PageId]) {
        for page in pages {
            let Some(Use::Kv { references, node }) = self.uses.get_mut(page.0 as usize) else { continue };
            *references += 1;
            if *references == 1 {
                self.cached -= 1;
                if let Some(node) = node {
                    self.evictable.remove(&(node.touched, *page));
                }
            }
        }
    }

    /// One reader fewer of each page. Full pages stay findable until their room is needed.
    pub fn release(&mut self, pages: &[PageId]) {
        self.clock += 1;
        for page in pages.iter().rev() {
            let Some(Use::Kv { references, node }) = self.uses.get_mut(page.0 as usize) else { continue };
            *references = references.saturating_sub(1);
            if *references > 0 {
                continue;
            }
            match node {
                Some(node) => {
                    node.touched = self.clock;
                    self.cached += 1;
                    if node.children == 0 {
                        self.evictable.insert((node.touched, *page));
                    }
                }
                None => self.make_free(*page),
            }
        }
    }

    /// `count` pages for keys and values with one reader each, or `None` and nothing changed.
    pub fn take_kv(&mut self, count: u32) -> Option<Vec<PageId>> {
        self.take(count, || Use::Kv { references: 1, node: None })
    }

    /// `count` pages for an adapter, or `None` and nothing changed.
    pub fn take_adapter(&mut self, count: u32) -> Option<Vec<PageId>> {
        let pages = self.take(count, || Use::Adapter)?;
        self.adapter += count;
        Some(pages)
    }

    pub fn release_adapter(&mut self, pages: &[PageId]) {
        for page in pages {
            if matches!(self.uses.get(page.0 as usize), Some(Use::Adapter)) {
                self.adapter -= 1;
                self.make_free(*page);
            }
        }
    }

    /// Makes a full, computed page findable. `before` is the page in front of it, itself findable, or `None` for the
    /// first. Returns the page to use from now on: another one if the same content is known already (then the reader
    /// has moved to it, and `page` has been released).
    pub fn publish(&mut self, owner: KvOwner, before: Option<PageId>, tokens: &[u32], page: PageId) -> PageId {
        let parent = match before.map(|page| self.node(page).map(|node| node.id)) {
            None => Parent::Root(owner),
            Some(Some(id)) => Parent::Node(id),
            Some(None) => return page,
        };
        let key = (parent, Box::from(tokens));
        if let Some(known) = self.index.get(&key).copied() {
            if known != page {
                self.retain(&[known]);
                self.release(&[page]);
            }
            return known;
        }
        let id = NodeId(self.next_node);
        self.next_node += 1;
        let fresh =
            Node { id, parent, parent_page: before, tokens: Box::from(tokens), children: 0, touched: self.clock };
        if let Some(Use::Kv { node: node @ None, .. }) = self.uses.get_mut(page.0 as usize) {
            *node = Some(fresh);
            self.index.insert(key, page);
            if let Some(node) = before.and_then(|page| self.node_mut(page)) {
                node.children += 1;
            }
        }
        page
    }

    /// Every relation that must hold between the tables, or what is broken.
    pub fn check(&self) -> Result<(), String> {
        let mut counts = PageCounts { total: self.uses.len() as u32, ..PageCounts::default() };
        let mut leaves = BTreeSet::new();
        for (number, entry) in self.uses.iter().enumerate() {
            let page = PageId(number as u32);
            match entry {
                Use::Free => counts.free += 1,
                Use::Adapter => counts.adapter += 1,
                Use::Kv { references: 0, node: None } => return Err(format!("{page:?} has neither reader nor node")),
                Use::Kv { references: 0, node: Some(node) } => {
                    counts.cached += 1;
                    if node.children == 0 {
                        leaves.insert((node.touched, page));
                    }
                }
                Use::Kv { .. } => counts.kv += 1,
            }
            if let Use::Kv { node: Some(node), .. } = entry
                && self.index.get(&(node.parent, node.tokens.clone())) != Some(&page)
            {
                return Err(format!("{page:?} is not found under its own key"));
            }
        }
        if counts != self.counts() {
            return Err(format!("pages are {counts:?}, counted as {:?}", self.counts()));
        }
        if leaves != self.evictable {
            return Err(format!("cached leaves are {leaves:?}, listed as {:?}", self.evictable));
        }
        Ok(())
    }

    /// Each page has as many readers as `readers` says.
    pub fn check_readers(&self, readers: &BTreeMap<PageId, u32>) -> Result<(), String> {
        for number in 0..self.uses.len() as u32 {
            let page = PageId(number);
            let (counted, known) = (readers.get(&page).copied().unwrap_or(0), self.references(page));
            if counted != known {
                return Err(format!("{page:?} has {counted} readers, counted as {known}"));
            }
        }
        Ok(())
    }

    fn take(&mut self, count: u32, make: impl Fn() -> Use) -> Option<Vec<PageId>> {
        if count > self.available() {
            return None;
        }
        let mut taken = Vec::with_capacity(count as usize);
        while taken.len() < count as usize {
            match self.free.pop() {
                Some(page) => {
                    if let Some(entry) = self.uses.get_mut(page.0 as usize) {
                        *entry = make();
                    }
                    taken.push(page);
                }
                None => self.evict_one(),
            }
        }
        Some(taken)
    }

    /// Frees the least recently used cached leaf. A cached page's children are cached too, so there is always a leaf.
    fn evict_one(&mut self) {
        let Some((_, page)) = self.evictable.pop_first() else { return };
        let Some(Use::Kv { node: Some(node), .. }) = self.uses.get_mut(page.0 as usize) else { return };
        let node = node.clone();
        self.index.remove(&(node.parent, node.tokens));
        self.cached -= 1;
        self.make_free(page);
        let Some(above) = node.parent_page else { return };
        let Some(Use::Kv { references, node: Some(parent) }) = self.uses.get_mut(above.0 as usize) else { return };
        parent.children -= 1;
        if parent.children == 0 && *references == 0 {
            self.evictable.insert((parent.touched, above));
        }
    }

    fn make_free(&mut self, page: PageId) {
        if let Some(entry) = self.uses.get_mut(page.0 as usize) {
            *entry = Use::Free;
            self.free.push(page);
        }
    }

    fn references(&self, page: PageId) -> u32 {
        match self.uses.get(page.0 as usize) {
            Some(Use::Kv { references, .. }) => *references,
            _ => 0,
        }
    }

    fn node(&self, page: PageId) -> Option<&Node> {
        match self.uses.get(page.0 as usize) {
            Some(Use::Kv { node, .. }) => node.as_ref(),
            _ => None,
        }
    }

    fn node_mut(&mut self, page: PageId) -> Option<&mut Node> {
        match self.uses.get_mut(page.0 as usize) {
            Some(Use::Kv { node, .. }) => node.as_mut(),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filled(pages: &mut Pages, owner: KvOwner, tokens: &[u32]) -> Vec<PageId> {
        let mut held = pages.take_kv(tokens.len() as u32 / 2).unwrap();
        for (number, chunk) in tokens.chunks_exact(2).enumerate() {
            let before = number.checked_sub(1).map(|before| held[before]);
            held[number] = pages.publish(owner, before, chunk, held[number]);
        }
        pages.check().unwrap();
        held
    }

    #[test]
    fn the_same_tokens_are_found_under_the_same_owner_only() {
        let mut pages = Pages::new(8, 2);
        let adapter = KvOwner::Adapter(lorafleet_artifact::Digest::from_bytes([1; 32]));
        let held = filled(&mut pages, KvOwner::Base, &[1, 2, 3, 4]);
        pages.release(&held);
        assert_eq!(pages.find(KvOwner::Base, &[1, 2, 3, 4, 5], 8), held);
        assert_eq!(pages.find(KvOwner::Base, &[1, 2, 9, 9], 8), held[..1]);
        assert_eq!(pages.find(KvOwner::Base, &[3, 4], 8), []);
        assert_eq!(pages.find(adapter, &[1, 2, 3, 4], 8), []);
    }

    #[test]
    fn a_second_copy_of_the_same_content_is_given_back() {
        let mut pages = Pages::new(8, 2);
        let first = filled(&mut pages, KvOwner::Base, &[1, 2, 3, 4]);
        let second = filled(&mut pages, KvOwner::Base, &[1, 2, 3, 4]);
        assert_eq!(first, second);
        assert_eq!(pages.counts().kv, 2);
        pages.release(&first);
        pages.release(&second);
        assert_eq!(pages.counts(), PageCounts { total: 8, free: 6, cached: 2, adapter: 0, kv: 0 });
    }

    #[test]
    fn children_are_evicted_before_their_parents_and_the_oldest_first() {
        let mut pages = Pages::new(4, 2);
        let long = filled(&mut pages, KvOwner::Base, &[1, 2, 3, 4, 5, 6]);
        pages.release(&long);
        assert!(pages.take_kv(5).is_none());
        let taken = pages.take_kv(2).unwrap();
        assert_eq!(pages.find(KvOwner::Base, &[1, 2, 3, 4, 5, 6], 8), long[..2]);
        pages.release(&taken);
        assert_eq!(pages.take_adapter(4).unwrap().len(), 4);
        assert_eq!(pages.find(KvOwner::Base, &[1, 2], 8), []);
        pages.check().unwrap();
    }
}
