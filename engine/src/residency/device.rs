//! Which adapters hold which pages of the device.

use std::collections::BTreeSet;
use std::time::Instant;

use lorafleet_artifact::Digest;
use lorafleet_backend::batch::{ResidentId, Upload};
use lorafleet_crds::wire::Floor;

use super::Residency;
use super::entry::{Device, Entry};
use crate::pages::Pages;

impl Residency {
    /// Device pages of an adapter; 0 while unknown.
    pub fn pages_of(&self, digest: &Digest) -> u32 {
        self.entries.get(digest).map_or(0, |entry| entry.pages)
    }

    /// The same, but 0 where a floor holds it on the device.
    pub fn loose_pages_of(&self, digest: &Digest) -> u32 {
        self.entries.get(digest).map_or(0, |entry| entry.pages - entry.pinned_pages())
    }

    /// Its device copy, once the next step has it whole.
    pub fn resident(&self, digest: &Digest) -> Option<ResidentId> {
        self.entries.get(digest)?.on_device().map(|device| device.resident)
    }

    /// A copy is in host memory and no upload is under way that would be followed by its own: what it lacks is room.
    pub fn lacks_room(&self, digest: &Digest) -> bool {
        let lacks = |entry: &Entry| entry.host.is_some() && entry.device.is_none();
        self.uploading.is_empty() && self.entries.get(digest).is_some_and(lacks)
    }

    /// On the device, whole or on its way, used by nobody, not held there by a floor.
    pub fn is_idle(&self, digest: &Digest) -> bool {
        self.entries.get(digest).is_some_and(Entry::is_idle)
    }

    /// Device pages of all idle adapters.
    pub fn idle_pages(&self) -> u32 {
        self.entries.values().filter(|entry| entry.is_idle()).map(|entry| entry.pages).sum()
    }

    /// Those of them that are half uploaded.
    pub fn uploading_pages(&self) -> u32 {
        let entries = self.uploading.iter().filter_map(|digest| self.entries.get(digest));
        entries.filter(|entry| entry.is_idle()).map(|entry| entry.pages).sum()
    }

    /// Device pages of adapters that a floor holds there.
    pub fn pinned_pages(&self) -> u32 {
        self.entries.values().map(Entry::pinned_pages).sum()
    }

    /// The same without this adapter's own.
    pub fn pinned_pages_beside(&self, digest: &Digest) -> u32 {
        self.pinned_pages() - self.entries.get(digest).map_or(0, Entry::pinned_pages)
    }

    /// Bytes of an adapter, and of the others that a floor holds in host memory.
    pub fn pinned_host_bytes(&self, digest: &Digest) -> (u64, u64) {
        let held = |entry: &&Entry| entry.enrolment.pinned && entry.enrolment.floor == Floor::Host && !entry.retired;
        let others = self.entries.values().filter(held).filter(|entry| entry.enrolment.digest != *digest);
        (self.bytes_of(digest), others.map(|entry| entry.bytes).sum())
    }

    /// Gives the device pages back. The caller tells the backend to forget the resident.
    pub fn drop_device(&mut self, digest: &Digest, pages: &mut Pages) -> Option<ResidentId> {
        self.changes += 1;
        let entry = self.entries.get_mut(digest)?;
        if entry.leases() > 0 {
            return None;
        }
        let device = entry.device.take()?;
        self.uploading.remove(digest);
        entry.evictions += 1;
        pages.release_adapter(&device.pages);
        Some(device.resident)
    }

    /// Takes all the pages of a device copy; `write` fills them.
    pub fn place(&mut self, digest: &Digest, pages: &mut Pages) {
        self.changes += 1;
        let Some(entry) = self.entries.get_mut(digest) else { return };
        let Some(adapter) = &entry.host else { return };
        if entry.device.is_some() {
            return;
        }
        let Some(taken) = pages.take_adapter(entry.pages) else { return };
        let resident = ResidentId(self.next_resident);
        self.next_resident += 1;
        entry.device = Some(Device { resident, pages: taken, written: 0, from: Some(adapter.clone()) });
        self.uploading.insert(*digest);
    }

    /// The next piece of a device copy that has its pages. The caller puts it into the next batch.
    pub fn write(&mut self, digest: &Digest, pages: u32, now: Instant) -> Option<Upload> {
        self.changes += 1;
        let entry = self.entries.get_mut(digest)?;
        entry.touched = now;
        let device = entry.device.as_mut()?;
        let part = device.written..device.written + pages.min(device.pages_left());
        let adapter = device.from.clone()?;
        device.written = part.end;
        let upload = Upload { resident: device.resident, adapter, pages: device.pages.clone(), part };
        if device.pages_left() == 0 {
            device.from = None;
            entry.was_on_device = true;
            self.uploading.remove(digest);
        }
        Some(upload)
    }

    /// Takes back a device copy that is not there.
    pub fn forget_resident(&mut self, resident: ResidentId, pages: &mut Pages) {
        self.changes += 1;
        let held = |entry: &Entry| entry.device.as_ref().is_some_and(|device| device.resident == resident);
        let Some((digest, entry)) = self.entries.iter_mut().find(|(_, entry)| held(entry)) else { return };
        self.uploading.remove(digest);
        if let Some(device) = entry.device.take() {
            pages.release_adapter(&device.pages);
        }
    }

    pub fn device_pages(&self) -> u32 {
        let devices = self.entries.values().filter_map(|entry| entry.device.as_ref());
        devices.map(|device| device.pages.len() as u32).sum()
    }

    /// What is half on the device is listed, and can still be written.
    ///
    /// # Errors
    /// What is broken.
    pub fn check(&self) -> Result<(), String> {
        let uploading = self.entries.iter().filter(|(_, entry)| entry.is_uploading());
        let uploading: BTreeSet<Digest> = uploading.map(|(digest, _)| *digest).collect();
        if uploading != self.uploading {
            return Err(format!("{uploading:?} are half on the device, listed are {:?}", self.uploading));
        }
        let lost = self.entries.iter().find(|(_, entry)| {
            let source = entry.device.as_ref().is_some_and(|device| device.from.is_some());
            source != entry.is_uploading() || (source && entry.host.is_none())
        });
        lost.map_or(Ok(()), |(digest, _)| Err(format!("{digest} is half on the device without its host copy")))
    }

    /// Frees the least recently used idle adapter's device pages.
    pub fn evict_idle(&mut self, pages: &mut Pages) -> Option<ResidentId> {
        let oldest = self.entries.iter().filter(|(_, entry)| entry.is_idle()).min_by_key(|(_, entry)| entry.touched);
        let digest = *oldest?.0;
        self.drop_device(&digest, pages)
    }
}
