//! Reads the closing lines of test runners and adds them up.

/// Tests that passed and failed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    pub passed: u64,
    pub failed: u64,
}

impl Tally {
    /// Adds the counts of a libtest closing line (`test result: ok. 3 passed; 0 failed; ...`); other lines count nothing.
    pub fn see(&mut self, line: &str) {
        let Some(rest) = line.trim().strip_prefix("test result:") else { return };
        self.passed += count_before(rest, "passed");
        self.failed += count_before(rest, "failed");
    }

    /// Adds one check that is no test suite, such as the formatter.
    pub fn check(&mut self, passed: bool) {
        if passed {
            self.passed += 1;
        } else {
            self.failed += 1;
        }
    }
}

fn count_before(text: &str, word: &str) -> u64 {
    text.split([';', '.'])
        .filter_map(|part| part.trim().strip_suffix(word))
        .find_map(|number| number.trim().parse().ok())
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn adds_up_the_closing_lines() {
        let mut tally = Tally::default();
        for line in [
            "running 3 tests",
            "test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.50s",
            "test result: FAILED. 12 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out; finished in 1.25s",
            "the answer says 7 passed; 9 failed",
        ] {
            tally.see(line);
        }
        tally.check(true);
        tally.check(false);
        assert_eq!(tally, Tally { passed: 16, failed: 3 });
    }
}
