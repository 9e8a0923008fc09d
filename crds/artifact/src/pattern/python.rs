//! Regular expressions of Python's `re`, written as the engine here understands them.
//!
//! The two languages share most of their syntax and differ where nobody looks: `[[a]` and `[a&&b]` are plain classes in
//! Python and operations on sets here, `\h` is an error there and white space here. A pattern that is read otherwise than by
//! PEFT gives another scale without a word, so every construct is either rewritten or refused by its name.
//! <https://docs.python.org/3/library/re.html>

/// Everything that has a meaning of its own in the engine's syntax, inside or outside of a class.
const SPECIAL: &str = r"\.+*?()|[]{}^$#&-~";

/// The expression in the engine's syntax, groups balanced, white space and comments of verbose mode taken out.
///
/// # Errors
/// What Python would not compile, as far as the difference matters, and what is not supported here.
pub(super) fn translate(python: &str) -> Result<String, String> {
    let mut translator = Translator { rest: python.chars().collect(), at: 0, out: String::new(), verbose: vec![false] };
    translator.run()?;
    Ok(translator.out)
}

struct Translator {
    rest: Vec<char>,
    at: usize,
    out: String,
    /// Whether white space counts for nothing, for the whole and for each open group.
    verbose: Vec<bool>,
}

/// What a quantifier would stand behind.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Before {
    /// The start of a branch, or a place between characters.
    Nothing,
    Item,
    Repeated,
}

/// One escape or character of a class.
enum Member {
    One(char),
    /// A class of its own, `\d`, as it stands within brackets. Those of ASCII: names are, and those of all of Unicode are so
    /// large that a few of them are more than an expression may take.
    Class(&'static str),
}

impl Translator {
    fn peek(&self) -> Option<char> {
        self.rest.get(self.at).copied()
    }

    fn next(&mut self) -> Option<char> {
        let found = self.peek();
        self.at += usize::from(found.is_some());
        found
    }

    fn eat(&mut self, wanted: char) -> bool {
        let found = self.peek() == Some(wanted);
        self.at += usize::from(found);
        found
    }

    /// The text up to `end`, which is taken too.
    fn until(&mut self, end: char) -> Result<String, String> {
        let mut text = String::new();
        loop {
            match self.next() {
                None => return Err(format!("'{end}' is missing")),
                Some(found) if found == end => return Ok(text),
                Some(found) => text.push(found),
            }
        }
    }

    fn literal(&mut self, character: char) {
        if SPECIAL.contains(character) {
            self.out.push('\\');
        }
        self.out.push(character);
    }

    fn run(&mut self) -> Result<(), String> {
        let mut before = Before::Nothing;
        while let Some(character) = self.next() {
            before = match character {
                '\\' => self.escape()?,
                '[' => self.class()?,
                '(' => self.open()?.unwrap_or(before),
                ')' => self.close()?,
                '|' | '^' => self.keep(character, Before::Nothing),
                '$' => self.keep(character, Before::Nothing),
                '.' => self.keep(character, Before::Item),
                '*' | '+' | '?' => self.repeat(&character.to_string(), before)?,
                '{' => match self.counts() {
                    Some(counts) => self.repeat(&counts, before)?,
                    None => self.item('{'),
                },
                space if self.is_verbose() && space.is_whitespace() => before,
                '#' if self.is_verbose() => {
                    while self.next().is_some_and(|found| found != '\n') {}
                    before
                }
                other => self.item(other),
            };
        }
        if self.verbose.len() == 1 { Ok(()) } else { Err("')' is missing".to_owned()) }
    }

    fn keep(&mut self, character: char, before: Before) -> Before {
        self.out.push(character);
        before
    }

    fn item(&mut self, character: char) -> Before {
        self.literal(character);
        Before::Item
    }

    fn is_verbose(&self) -> bool {
        self.verbose.last().copied().unwrap_or(false)
    }

    fn repeat(&mut self, quantifier: &str, before: Before) -> Result<Before, String> {
        match before {
            Before::Nothing => return Err(format!("nothing to repeat before '{quantifier}'")),
            Before::Repeated => return Err(format!("'{quantifier}' repeats what is repeated already")),
            Before::Item => self.out.push_str(quantifier),
        }
        for mode in ['?', '+'] {
            if self.eat(mode) {
                self.out.push(mode);
                break;
            }
        }
        Ok(Before::Repeated)
    }

    /// What stands in the braces of a quantifier, with its lower bound; `None` leaves the brace a character.
    fn counts(&mut self) -> Option<String> {
        let start = self.at;
        let number = |from: &mut Self| {
            let mut digits = String::new();
            while let Some(digit) = from.peek().filter(char::is_ascii_digit) {
                from.at += 1;
                digits.push(digit);
            }
            digits
        };
        let low = number(self);
        let comma = self.eat(',');
        let high = if comma { number(self) } else { String::new() };
        if !self.eat('}') || (low.is_empty() && !comma) {
            self.at = start;
            return None;
        }
        let low = if low.is_empty() { "0" } else { &low };
        Some(if comma { format!("{{{low},{high}}}") } else { format!("{{{low}}}") })
    }

    fn close(&mut self) -> Result<Before, String> {
        if self.verbose.len() == 1 {
            return Err("')' closes nothing".to_owned());
        }
        self.verbose.pop();
        Ok(self.keep(')', Before::Item))
    }

    /// Behind a `(`. `None` where nothing came out of it: a comment, or flags of the whole.
    fn open(&mut self) -> Result<Option<Before>, String> {
        let at_start = self.at == 1;
        let mut verbose = self.is_verbose();
        if !self.eat('?') {
            self.out.push('(');
        } else {
            match self.next() {
                Some('#') => return self.until(')').map(|_| None),
                Some(kind @ (':' | '=' | '!' | '>')) => self.out.extend(['(', '?', kind]),
                Some('<') => match self.next() {
                    Some(kind @ ('=' | '!')) => self.out.extend(['(', '?', '<', kind]),
                    _ => return Err("'(?<' is no extension of Python's: a named group is '(?P<name>'".to_owned()),
                },
                Some('P') if self.eat('<') => {
                    let name = self.until('>')?;
                    self.out.push_str(&format!("(?P<{}>", checked(&name)?));
                }
                Some('P') if self.eat('=') => {
                    let name = self.until(')')?;
                    self.out.push_str(&format!("(?P={})", checked(&name)?));
                    return Ok(Some(Before::Item));
                }
                Some('(') => {
                    let group = self.until(')')?;
                    let number = !group.is_empty() && group.chars().all(|digit| digit.is_ascii_digit());
                    let group = if number { group } else { format!("<{}>", checked(&group)?) };
                    self.out.push_str(&format!("(?({group})"));
                }
                Some(flag) if flag == '-' || flag.is_ascii_alphabetic() => {
                    self.at -= 1;
                    if self.flags(&mut verbose, at_start)? {
                        return Ok(None);
                    }
                }
                _ => return Err("'(?' is followed by no extension of Python's".to_owned()),
            }
        }
        self.verbose.push(verbose);
        Ok(Some(Before::Nothing))
    }

    /// `(?i)` and `(?i-s:`. Whether the flags are those of the whole, which opens no group.
    fn flags(&mut self, verbose: &mut bool, at_start: bool) -> Result<bool, String> {
        let (mut on, mut off) = (String::new(), String::new());
        let mut minus = false;
        let end = loop {
            match self.next() {
                Some('-') if !minus => minus = true,
                // The names are ASCII, so that these two change nothing.
                Some('a' | 'u') => {}
                Some('x') => *verbose = !minus,
                Some(flag @ ('i' | 'm' | 's')) if minus => off.push(flag),
                Some(flag @ ('i' | 'm' | 's')) => on.push(flag),
                Some(end @ (':' | ')')) => break end,
                Some(other) => return Err(format!("'{other}' is no flag of Python's for text")),
                None => return Err("')' is missing".to_owned()),
            }
        };
        if end == ')' && (!at_start || minus) {
            return Err("flags of the whole expression stand elsewhere than at its start".to_owned());
        }
        let off = if off.is_empty() { off } else { format!("-{off}") };
        let flags = format!("{on}{off}");
        match end {
            ':' => self.out.push_str(&format!("(?{flags}:")),
            _ if flags.is_empty() => {}
            _ => self.out.push_str(&format!("(?{flags})")),
        }
        if end == ')' {
            self.verbose = vec![*verbose];
        }
        Ok(end == ')')
    }

    /// Behind a backslash outside of a class.
    fn escape(&mut self) -> Result<Before, String> {
        match self.peek() {
            Some(place @ ('A' | 'b' | 'B')) => {
                self.at += 1;
                self.out.extend(['\\', place]);
                Ok(Before::Nothing)
            }
            Some('Z' | 'z') => {
                self.at += 1;
                self.out.push_str(r"\z");
                Ok(Before::Nothing)
            }
            Some('1'..='9') => match self.octal() {
                Some(character) => Ok(self.item(character?)),
                None => {
                    let digits: String =
                        self.rest.iter().skip(self.at).take(2).take_while(|digit| digit.is_ascii_digit()).collect();
                    self.at += digits.len();
                    self.out.push_str(&format!(r"(?:\{digits})"));
                    Ok(Before::Item)
                }
            },
            _ => {
                match self.member()? {
                    Member::One(character) => self.literal(character),
                    Member::Class(class) => self.out.push_str(&format!("[{class}]")),
                }
                Ok(Before::Item)
            }
        }
    }

    /// Three octal digits, or up to three behind a zero: a character by its number.
    fn octal(&mut self) -> Option<Result<char, String>> {
        let digits: String =
            self.rest.iter().skip(self.at).take(3).take_while(|digit| ('0'..='7').contains(*digit)).collect();
        if digits.len() < 3 && !digits.starts_with('0') {
            return None;
        }
        self.at += digits.len();
        let number = u32::from_str_radix(&digits, 8).ok().filter(|number| *number <= 0o377);
        Some(number.and_then(char::from_u32).ok_or_else(|| format!(r"'\{digits}' is no character")))
    }

    /// Behind a backslash, what means the same in a class and outside of one.
    fn member(&mut self) -> Result<Member, String> {
        if let Some(character) = self.octal() {
            return character.map(Member::One);
        }
        let character = match self.next().ok_or("it ends in a backslash")? {
            'd' => return Ok(Member::Class("[:digit:]")),
            'D' => return Ok(Member::Class(r"\x00-/:-\x7f")),
            's' => return Ok(Member::Class("[:space:]")),
            'S' => return Ok(Member::Class(r"\x00-\x08\x0e-\x1f!-\x7f")),
            'w' => return Ok(Member::Class("[:word:]")),
            'W' => return Ok(Member::Class(r"\x00-/:-@\[-\^`{-\x7f")),
            'a' => '\x07',
            'f' => '\x0c',
            'n' => '\n',
            'r' => '\r',
            't' => '\t',
            'v' => '\x0b',
            'x' => self.hexadecimal(2)?,
            'u' => self.hexadecimal(4)?,
            'U' => self.hexadecimal(8)?,
            other if other.is_ascii_alphanumeric() => {
                return Err(format!(r"'\{other}' is no escape of Python's that is supported here"));
            }
            other => other,
        };
        Ok(Member::One(character))
    }

    fn hexadecimal(&mut self, length: usize) -> Result<char, String> {
        let digits: String = self.rest.iter().skip(self.at).take(length).collect();
        self.at += digits.chars().count();
        let number = u32::from_str_radix(&digits, 16).ok().filter(|_| digits.len() == length);
        number.and_then(char::from_u32).ok_or_else(|| format!("'{digits}' is no character's number"))
    }

    /// Behind a `[`: every member alone and escaped, so that nothing in it can be an operation on sets.
    fn class(&mut self) -> Result<Before, String> {
        self.out.push('[');
        if self.eat('^') {
            self.out.push('^');
        }
        let mut first = true;
        loop {
            let low = match self.next().ok_or("']' is missing")? {
                ']' if !first => break,
                '\\' => self.class_escape()?,
                other => Member::One(other),
            };
            first = false;
            let range = self.peek() == Some('-') && self.rest.get(self.at + 1).is_some_and(|found| *found != ']');
            if !range {
                match low {
                    Member::One(character) => self.literal(character),
                    Member::Class(class) => self.out.push_str(class),
                }
                continue;
            }
            self.at += 1;
            let high = match self.next().ok_or("']' is missing")? {
                '\\' => self.class_escape()?,
                other => Member::One(other),
            };
            match (low, high) {
                (Member::One(low), Member::One(high)) if low <= high => {
                    self.literal(low);
                    self.out.push('-');
                    self.literal(high);
                }
                _ => return Err("a class holds a range without an order".to_owned()),
            }
        }
        self.out.push(']');
        Ok(Before::Item)
    }

    fn class_escape(&mut self) -> Result<Member, String> {
        if self.eat('b') { Ok(Member::One('\x08')) } else { self.member() }
    }
}

/// A group's name: what both languages take for one.
fn checked(name: &str) -> Result<&str, String> {
    let letters = |found: char| found.is_ascii_alphanumeric() || found == '_';
    let good = name.chars().all(letters) && name.starts_with(|found: char| !found.is_ascii_digit());
    if good { Ok(name) } else { Err(format!("'{name}' is no name of a group")) }
}
