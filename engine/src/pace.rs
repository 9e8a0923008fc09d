//! What a row of a step takes on this machine, as the steps with prompts in them show.

use std::time::Duration;

/// A step with fewer rows says more about reading the weights than about rows.
const ROWS_MIN: u32 = 16;
/// The last step counts for one part in so many.
const MEMORY: u32 = 4;

#[derive(Clone, Copy, Debug, Default)]
pub struct Pace {
    row: Option<Duration>,
}

impl Pace {
    pub fn stepped(&mut self, rows: u32, took: Duration) {
        if rows >= ROWS_MIN {
            let row = took / rows;
            self.row = Some(self.row.map_or(row, |before| (before * (MEMORY - 1) + row) / MEMORY));
        }
    }

    /// Rows that take about so long; as many as one likes while nothing is known.
    pub fn rows_within(&self, time: Duration) -> u32 {
        let row = self.row.map_or(0, |row| row.as_nanos());
        time.as_nanos().checked_div(row).and_then(|rows| u32::try_from(rows).ok()).unwrap_or(u32::MAX)
    }
}
