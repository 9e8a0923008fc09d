//! What readers are to hear. It is kept back until the snapshot and the meter have it too: whoever hears the last of it finds
//! that answer in the reports and the metrics, and what it held given back.

use tokio::sync::mpsc;

use crate::sequence::Event;

#[derive(Debug, Default)]
pub struct Answers(Vec<(mpsc::Sender<Event>, Event)>);

impl Answers {
    pub fn add(&mut self, reader: &mpsc::Sender<Event>, event: Event) {
        self.0.push((reader.clone(), event));
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Never waits. A reader that is gone, or too slow for the room it made, is noticed by `Sequence::abandoned`.
    pub fn tell(&mut self) {
        for (reader, event) in self.0.drain(..) {
            let _ = reader.try_send(event);
        }
    }
}
