//! What a step, and a row of one, takes on this machine.

use std::time::Duration;

/// A step with fewer rows says more about reading the weights than about rows.
const ROWS_MIN: u32 = 16;
/// The last step counts for one part in so many.
const MEMORY: u32 = 4;

#[derive(Clone, Copy, Debug, Default)]
pub struct Pace {
    /// As the steps with prompts in them show.
    row: Option<Duration>,
    step: Option<Duration>,
}

impl Pace {
    pub fn stepped(&mut self, rows: u32, took: Duration) {
        if rows > 0 {
            self.step = Some(mean(self.step, took));
        }
        if rows >= ROWS_MIN {
            self.row = Some(mean(self.row, took / rows));
        }
    }

    /// What a step took lately; nothing while none has been.
    pub fn step(&self) -> Duration {
        self.step.unwrap_or_default()
    }

    /// Rows that take about so long; as many as one likes while nothing is known.
    pub fn rows_within(&self, time: Duration) -> u32 {
        let row = self.row.map_or(0, |row| row.as_nanos());
        time.as_nanos().checked_div(row).and_then(|rows| u32::try_from(rows).ok()).unwrap_or(u32::MAX)
    }
}

fn mean(before: Option<Duration>, last: Duration) -> Duration {
    before.map_or(last, |before| (before * (MEMORY - 1) + last) / MEMORY)
}
