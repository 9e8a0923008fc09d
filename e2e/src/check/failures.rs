//! What failed, in few enough lines for the end of a run: a log of hours is cut in its middle, and its end is what everybody sees.
use std::fmt::Write;

/// Lines of one failure that are told.
const LINES_MAX: usize = 12;
/// Characters of one of these lines, such as a page of metrics within an assertion.
const LINE_CHARS_MAX: usize = 300;
/// Characters of one failure.
const TEXT_CHARS_MAX: usize = 1_500;
/// Characters of all failures; those that come after them are named alone.
const ALL_CHARS_MAX: usize = 12_000;
/// Failures that are named.
const NAMES_MAX: usize = 100;

/// A check or a test that failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    pub name: String,
    /// The first lines of its error or panic, without a backtrace; may be empty.
    pub text: String,
}

impl Failure {
    /// A failed test by all that it printed.
    pub fn of_test(name: impl Into<String>, printed: &[String]) -> Self {
        Self { name: name.into(), text: text(&panics(printed)) }
    }

    /// A failed check by its error, which may end with all that a compiler has printed.
    pub fn of_check(name: impl Into<String>, error: &str) -> Self {
        let lines: Vec<&str> = error.lines().collect();
        let compiler = lines.iter().position(|line| line.trim_start().starts_with("error"));
        let kept = match (lines.first(), compiler) {
            (Some(first), Some(at)) if at > 0 => [&[*first][..], &lines[at..]].concat(),
            _ => lines,
        };
        Self { name: name.into(), text: text(&kept) }
    }
}

/// The closing section: each failure's name and first lines; nothing when nothing failed.
pub fn section(failures: &[Failure]) -> String {
    if failures.is_empty() {
        return String::new();
    }
    let mut told = "\nwhat failed:\n".to_owned();
    let mut chars = 0;
    for Failure { name, text } in failures.iter().take(NAMES_MAX) {
        chars += text.chars().count();
        let _ = writeln!(told, "--- {}", line_of(name));
        if chars <= ALL_CHARS_MAX {
            told.push_str(text);
        } else if !text.is_empty() {
            told.push_str("  (its words stand further up)\n");
        }
    }
    if failures.len() > NAMES_MAX {
        let _ = writeln!(told, "--- and {} more", failures.len() - NAMES_MAX);
    }
    told
}

/// Of what a test printed, the message of its first panic and the head of its last, which may be another thread's; or the error
/// that it returned; or the end of what there is.
fn panics(printed: &[String]) -> Vec<&str> {
    let lines: Vec<&str> = printed.iter().map(String::as_str).collect();
    let is_panic = |line: &&str| line.starts_with("thread '") && line.contains("' ") && line.contains(" panicked at ");
    let message = |from: usize| lines[from..].iter().copied().take_while(|line| !is_backtrace(line));
    let filled = |line: &&str| !line.trim().is_empty();
    match (lines.iter().position(is_panic), lines.iter().rposition(is_panic)) {
        (Some(first), Some(last)) if last > first => {
            // What comes of the first, such as the end of the thread that waited for it, says less.
            let tail: Vec<&str> = message(last).filter(filled).take(LINES_MAX / 3).collect();
            let head = message(first).enumerate().take_while(|(at, line)| *at == 0 || !is_panic(line)).map(|it| it.1);
            head.filter(filled).take(LINES_MAX - tail.len()).chain(tail.iter().copied()).collect()
        }
        (Some(only), _) => message(only).filter(filled).collect(),
        (None, _) => match lines.iter().position(|line| line.starts_with("Error: ")) {
            Some(error) => message(error).filter(filled).collect(),
            None => {
                let all: Vec<&str> = lines.iter().copied().filter(filled).collect();
                all[all.len().saturating_sub(LINES_MAX)..].to_vec()
            }
        },
    }
}

fn is_backtrace(line: &str) -> bool {
    // The first of them is an error's own, within the message.
    line.starts_with("Stack backtrace:")
        || line.starts_with("stack backtrace:")
        || line.starts_with("note: run with `RUST_BACKTRACE")
}

/// The first lines within the limits, indented.
fn text(lines: &[&str]) -> String {
    let mut text = String::new();
    for (at, line) in lines.iter().map(|line| line.trim_end()).filter(|line| !line.is_empty()).enumerate() {
        let line = format!("  {}\n", line_of(line));
        if at == LINES_MAX || text.chars().count() + line.chars().count() > TEXT_CHARS_MAX {
            text.push_str("  ...\n");
            break;
        }
        text.push_str(&line);
    }
    text
}

/// A line, cut where it is too long.
fn line_of(line: &str) -> String {
    match line.char_indices().nth(LINE_CHARS_MAX) {
        Some((end, _)) => format!("{}...", &line[..end]),
        None => line.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(printed: &str, expected: &str) {
        let printed: Vec<String> = printed.lines().map(str::to_owned).collect();
        assert_eq!(Failure::of_test("it", &printed).text, expected);
    }

    #[test]
    fn of_a_test_its_panic_is_told() {
        check(
            "[    0.0s] start cluster test ...

thread 'a::b' (4711) panicked at engine/tests/http/placement.rs:65:51:
assertion `left == right` failed
  left: 1
 right: 2
stack backtrace:
   0: __rustc::rust_begin_unwind
note: Some details are omitted, run with `RUST_BACKTRACE=full` for a verbose backtrace.
namespace a-1: everything",
            "  thread 'a::b' (4711) panicked at engine/tests/http/placement.rs:65:51:
  assertion `left == right` failed
    left: 1
   right: 2
",
        );
        // An older compiler gives no thread's number.
        check(
            "thread 'b' panicked at x.rs:1:1:\nwell\nnote: run with `RUST_BACKTRACE=1` environment variable to display a backtrace\nmore",
            "  thread 'b' panicked at x.rs:1:1:\n  well\n",
        );
    }

    #[test]
    fn of_several_panics_the_first_and_the_last_are_told() {
        check(
            "thread '<unnamed>' (2) panicked at x.rs:1:1:
why
stack backtrace:
   0: it
thread 'other' (3) panicked at y.rs:2:2:
something else

thread 'main' (1) panicked at z.rs:3:3:
a scoped thread panicked
note: run with `RUST_BACKTRACE=1`",
            "  thread '<unnamed>' (2) panicked at x.rs:1:1:
  why
  thread 'main' (1) panicked at z.rs:3:3:
  a scoped thread panicked
",
        );
    }

    #[test]
    fn of_a_test_without_a_panic_its_error_or_its_last_words_are_told() {
        check(
            "before\nError: no\n\nCaused by:\n    0: reason\n\nStack backtrace:\n   0: it",
            "  Error: no\n  Caused by:\n      0: reason\n",
        );
        check(
            "note: test did not panic as expected at x.rs:1:1",
            "  note: test did not panic as expected at x.rs:1:1\n",
        );
        check("", "");
    }

    #[test]
    fn of_a_check_the_compilers_errors_are_told() {
        let error = "`cargo clippy`: exit status: 101\n     Checking a v0.1.0\n  warning: x\n  error: unused variable\n   --> a.rs:1";
        let told = "  `cargo clippy`: exit status: 101\n    error: unused variable\n     --> a.rs:1\n";
        assert_eq!(Failure::of_check("clippy", error).text, told);
        let error = "`cargo fmt`: exit status: 1\n  Diff in a.rs:1:";
        assert_eq!(Failure::of_check("formatting", error).text, "  `cargo fmt`: exit status: 1\n    Diff in a.rs:1:\n");
    }

    #[test]
    fn no_failure_is_endless() {
        let long = vec![format!("thread 'a' (1) panicked at {}", "ä".repeat(100_000)); 1];
        let told = Failure::of_test("it", &long).text;
        assert_eq!(told.chars().count(), "  ...\n".len() + LINE_CHARS_MAX);
        let many: Vec<String> = std::iter::once("thread 'a' (1) panicked at b".to_owned())
            .chain((0..100_000).map(|number| number.to_string()))
            .collect();
        let told = Failure::of_test("it", &many).text;
        assert!(told.starts_with("  thread 'a' (1) panicked at b\n  0\n"), "{told}");
        assert!(told.ends_with("  10\n  ...\n"), "{told}");
        let wide: Vec<String> = (0..10).map(|_| "x".repeat(290)).collect();
        assert!(Failure::of_test("it", &wide).text.chars().count() <= TEXT_CHARS_MAX + "  ...\n".len());
    }

    #[test]
    fn the_section_is_bounded_and_names_whoever_has_no_room() {
        assert_eq!(section(&[]), "");
        let two = [
            Failure { name: "formatting".to_owned(), text: "  bad\n".to_owned() },
            Failure { name: "a::b".to_owned(), text: String::new() },
        ];
        assert_eq!(section(&two), "\nwhat failed:\n--- formatting\n  bad\n--- a::b\n");
        let many: Vec<Failure> = (0..250)
            .map(|number| Failure { name: format!("t{number}"), text: format!("{}\n", "y".repeat(1_499)) })
            .collect();
        let told = section(&many);
        assert!(told.chars().count() < 2 * ALL_CHARS_MAX, "{}", told.chars().count());
        assert_eq!(told.matches("yyy\n").count(), 8);
        assert!(told.contains("--- t99\n") && !told.contains("--- t100\n"), "{told}");
        assert!(told.ends_with("--- and 150 more\n"), "{told}");
    }
}
