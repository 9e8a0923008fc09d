//! Reads what test runners print, line by line: how many tests passed and failed, and what those that failed said first.
use super::failures::Failure;

/// Lines of one failed test that are kept to find its panic in.
const KEPT_LINES_MAX: usize = 20_000;

/// What one or more runners have printed so far.
#[derive(Debug, Default)]
pub struct Reader {
    passed: u64,
    failed: u64,
    failures: Vec<Failure>,
    at: At,
    /// The last test that was begun or ended, to name where a runner has died.
    last: String,
    /// Names of this runner's failed tests, in the order in which they ended.
    names: Vec<String>,
    /// Failed tests of this runner and what each printed.
    sections: Vec<(String, Vec<String>)>,
}

/// Where in a runner's output the next line is.
#[derive(Debug, Default, PartialEq, Eq)]
enum At {
    /// Between runners.
    #[default]
    Outside,
    /// Tests run.
    Running,
    /// What failed tests printed comes now, each under its own head.
    Sections,
    /// The names of the failed tests again.
    Names,
}

impl Reader {
    /// Takes the next line.
    pub fn see(&mut self, line: &str) {
        match self.at {
            At::Outside | At::Running if is_start(line) => {
                self.lost();
                self.at = At::Running;
            }
            At::Outside => {}
            At::Running => self.see_running(line),
            At::Sections => {
                if let Some(name) = line.strip_prefix("---- ").and_then(|rest| rest.strip_suffix(" stdout ----")) {
                    self.sections.push((name.to_owned(), Vec::new()));
                } else if line == "failures:" {
                    self.at = At::Names;
                } else if let Some((_, printed)) = self.sections.last_mut()
                    && printed.len() < KEPT_LINES_MAX
                {
                    printed.push(line.to_owned());
                }
            }
            At::Names => self.see_result(line),
        }
    }

    /// Passed and failed tests, and the failed ones by name. A runner that ended without its closing line counts as one failure.
    pub fn finish(mut self) -> (u64, u64, Vec<Failure>) {
        self.lost();
        (self.passed, self.failed, self.failures)
    }

    /// `test NAME ...`, without its end while it runs alone, and with ` ok` or ` FAILED`.
    fn see_running(&mut self, line: &str) {
        if line == "failures:" {
            self.at = At::Sections;
        } else if let Some(test) = line.strip_prefix("test ") {
            if test.starts_with("result:") {
                return self.see_result(line);
            }
            if let Some((name, _)) = test.split_once(" ...") {
                self.last = name.to_owned();
            }
            if let Some(name) = test.strip_suffix(" ... FAILED") {
                self.names.push(name.to_owned());
            }
        }
    }

    /// A closing line: `test result: ok. 3 passed; 0 failed; ...`
    fn see_result(&mut self, line: &str) {
        let Some(counts) = line.strip_prefix("test result:") else { return };
        self.passed += count_before(counts, "passed");
        self.failed += count_before(counts, "failed");
        self.take_failed();
        self.at = At::Outside;
    }

    fn take_failed(&mut self) {
        let mut sections = std::mem::take(&mut self.sections);
        for name in std::mem::take(&mut self.names) {
            // `should_panic` stands behind the name in one place and not in the other.
            let bare = name.split(" - ").next().unwrap_or_default();
            let section = sections.iter().position(|(it, _)| *it == name || it == bare);
            let printed = section.map(|at| sections.swap_remove(at).1).unwrap_or_default();
            self.failures.push(Failure::of_test(name, &printed));
        }
        self.failures.extend(sections.into_iter().map(|(name, printed)| Failure::of_test(name, &printed)));
    }

    /// A runner that has begun and never gave its result has died, and what it counted with it.
    fn lost(&mut self) {
        if self.at == At::Outside {
            return;
        }
        self.take_failed();
        let told = ["it gave no result: it was killed, or ended the process".to_owned()];
        self.failures.push(Failure::of_test(format!("a test runner, in or after {}", self.last), &told));
        self.failed += 1;
        self.at = At::Outside;
    }
}

/// `running 3 tests`
fn is_start(line: &str) -> bool {
    let count = line.strip_prefix("running ").and_then(|rest| rest.split_once(" test"));
    count.is_some_and(|(number, rest)| number.parse::<u64>().is_ok() && (rest.is_empty() || rest == "s"))
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

    fn check(printed: &str, counts: (u64, u64), failures: &[(&str, &str)]) {
        let mut reader = Reader::default();
        printed.lines().for_each(|line| reader.see(line));
        let (passed, failed, found) = reader.finish();
        let found: Vec<(&str, &str)> = found.iter().map(|it| (it.name.as_str(), it.text.as_str())).collect();
        assert_eq!(((passed, failed), found), (counts, failures.to_vec()));
    }

    const GOOD: &str = "
running 3 tests
test a ... ok
test b ... ignored, needs a cluster
test c ... ok

test result: ok. 2 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.50s
";

    #[test]
    fn adds_up_the_closing_lines_of_runners() {
        check("", (0, 0), &[]);
        check(GOOD, (2, 0), &[]);
        check(&GOOD.repeat(3), (6, 0), &[]);
        check("\nrunning 1 test\ntest a ... ok\n\ntest result: ok. 1 passed; 0 failed; 0 ignored\n", (1, 0), &[]);
        check("the answer says 7 passed; 9 failed\n", (0, 0), &[]);
    }

    #[test]
    fn tells_what_failed_tests_said() {
        let bad = "
running 4 tests
test one::silent ... FAILED
test one::loud ... FAILED
test one::dies - should panic ... FAILED
test good ... ok

failures:

---- one::loud stdout ----
[    0.0s] start cluster test ...
running 9 tests
test result: ok. 9 passed; 0 failed

thread 'one::loud' (7) panicked at a.rs:1:2:
waited 120s until it holds
note: run with `RUST_BACKTRACE=1` environment variable to display a backtrace
namespace loud-1:
--- kubectl get pods

---- one::dies stdout ----
note: test did not panic as expected at a.rs:9:4

failures:
    one::dies
    one::loud
    one::silent

test result: FAILED. 1 passed; 3 failed; 0 ignored; 0 measured; 0 filtered out; finished in 1.25s
";
        let expected = [
            ("one::silent", ""),
            ("one::loud", "  thread 'one::loud' (7) panicked at a.rs:1:2:\n  waited 120s until it holds\n"),
            ("one::dies - should panic", "  note: test did not panic as expected at a.rs:9:4\n"),
        ];
        check(bad, (1, 3), &expected);
        check(&format!("{GOOD}{bad}{GOOD}"), (5, 3), &expected);
    }

    #[test]
    fn a_runner_that_dies_is_a_failure() {
        let lost = "  it gave no result: it was killed, or ended the process\n";
        let died = "\nrunning 2 tests\ntest a ... ok\ntest b ... \n";
        check(died, (0, 1), &[("a test runner, in or after b", lost)]);
        check(&format!("{died}{GOOD}"), (2, 1), &[("a test runner, in or after b", lost)]);
        let failed_before = "\nrunning 2 tests\ntest a ... FAILED\ntest b ... \n";
        check(failed_before, (0, 1), &[("a", ""), ("a test runner, in or after b", lost)]);
    }
}
