//! Gauges of the current state as text, under the names that routers of the Gateway API inference extension read. Pure.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use lorafleet_artifact::Digest;
use lorafleet_crds::wire::Tier;

use crate::limits::Limits;
use crate::metrics::tier_label;
use crate::names::Names;
use crate::residency::Facts;
use crate::snapshot::Snapshot;

/// Adapters with a residency series of their own: the most recently used.
const RESIDENCY_SERIES_MAX: usize = 64;
/// Names in one label of `vllm:lora_requests_info`.
const NAMES_MAX: usize = 256;

pub fn text(names: &Names, snapshot: &Snapshot, limits: &Limits, now_unix_s: f64) -> String {
    let mut page = Page(String::new());
    let pages = snapshot.pages;
    // Idle adapters and the prefix cache give way at once, so they are no use that a router should avoid.
    let used = f64::from(pages.kv + pages.adapter - snapshot.idle_adapter_pages) / f64::from(pages.total.max(1));
    page.gauge("vllm:num_requests_waiting", "Sequences that wait.", f64::from(snapshot.waiting));
    page.gauge("vllm:num_requests_running", "Sequences that run.", f64::from(snapshot.running));
    page.gauge("vllm:kv_cache_usage_perc", "Part of all pages in use, 0 to 1.", used);
    page.family("vllm:cache_config_info", "Pages: tokens in one, and how many.");
    page.sample(
        "vllm:cache_config_info",
        &[("block_size", snapshot.page_tokens.to_string()), ("num_gpu_blocks", pages.total.to_string())],
        1.0,
    );
    page.family("vllm:lora_requests_info", "Adapters of running and of waiting sequences.");
    page.sample(
        "vllm:lora_requests_info",
        &[
            ("max_lora", limits.max_adapters_per_batch.to_string()),
            ("running_lora_adapters", list(names, &snapshot.running_adapters)),
            ("waiting_lora_adapters", list(names, &snapshot.waiting_adapters)),
        ],
        now_unix_s,
    );
    residency(&mut page, names, snapshot, limits);
    let states: [(&str, &str, f64); 8] = [
        ("lorafleet_pages", "All pages.", pages.total.into()),
        ("lorafleet_pages_free", "Pages that hold nothing.", pages.free.into()),
        ("lorafleet_pages_cached", "Pages of the prefix cache and of idle adapters.", {
            f64::from(pages.cached + snapshot.idle_adapter_pages)
        }),
        ("lorafleet_page_bytes", "Bytes of one page.", snapshot.page_bytes as f64),
        ("lorafleet_host_cache_bytes", "Host memory for adapters.", snapshot.host_bytes_total as f64),
        ("lorafleet_host_cache_used_bytes", "Host memory that adapters take.", snapshot.host_bytes_used as f64),
        ("lorafleet_waiting_tokens", "Tokens that wait for their prefill.", snapshot.waiting_tokens as f64),
        ("lorafleet_adapters_known", "Adapters that may be asked for.", {
            snapshot.adapters.iter().filter(|facts| !facts.retired).count() as f64
        }),
    ];
    for (name, help, value) in states {
        page.gauge(name, help, value);
    }
    page.0
}

fn residency(page: &mut Page, names: &Names, snapshot: &Snapshot, limits: &Limits) {
    let on = |tier: Tier| snapshot.adapters.iter().filter(|facts| facts.tier == tier).count() as f64;
    page.gauge("vllm:num_gpu_loaded_lora_adapters", "Adapters on the device.", on(Tier::Device));
    page.gauge("vllm:num_cpu_loaded_lora_adapters", "Adapters in host memory only.", on(Tier::Host));
    page.gauge("vllm:max_gpu_lora_adapters", "Adapters in one batch.", limits.max_adapters_per_batch.into());
    let mut held: Vec<&Facts> = snapshot.adapters.iter().filter(|facts| facts.tier >= Tier::Host).collect();
    held.sort_by_key(|facts| std::cmp::Reverse((facts.tier, facts.last_used)));
    page.family("vllm:lora_adapter_loaded", "Adapters that are held, the most recently used first.");
    for facts in held.into_iter().take(RESIDENCY_SERIES_MAX) {
        let name = names.of(&facts.digest).into_iter().next().unwrap_or_else(|| facts.digest.short());
        let level = if facts.tier == Tier::Device { "gpu" } else { "cpu" };
        page.sample(
            "vllm:lora_adapter_loaded",
            &[
                ("adapter_name", name),
                ("level", level.to_owned()),
                ("pinned", facts.pinned.to_string()),
                ("rank", facts.rank.to_string()),
            ],
            1.0,
        );
    }
    page.family("lorafleet_adapters", "Adapters by their nearest tier.");
    for tier in [Tier::Source, Tier::Disk, Tier::Host, Tier::Device] {
        page.sample("lorafleet_adapters", &[("tier", tier_label(tier).to_owned())], on(tier));
    }
}

/// Every name that a client or a router may use for these adapters, bare and versioned.
fn list(names: &Names, adapters: &BTreeMap<Digest, u32>) -> String {
    let all: Vec<String> = adapters.keys().flat_map(|digest| names.of(digest)).take(NAMES_MAX).collect();
    all.join(",")
}

struct Page(String);

impl Page {
    fn family(&mut self, name: &str, help: &str) {
        let _ = writeln!(self.0, "# HELP {name} {help}\n# TYPE {name} gauge");
    }

    fn gauge(&mut self, name: &str, help: &str, value: f64) {
        self.family(name, help);
        self.sample(name, &[], value);
    }

    fn sample(&mut self, name: &str, labels: &[(&str, String)], value: f64) {
        self.0.push_str(name);
        if !labels.is_empty() {
            let shown: Vec<String> =
                labels.iter().map(|(label, value)| format!("{label}=\"{}\"", escaped(value))).collect();
            let _ = write!(self.0, "{{{}}}", shown.join(","));
        }
        let _ = writeln!(self.0, " {value}");
    }
}

fn escaped(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn routers_find_one_lora_series_with_running_and_waiting_apart() {
        let digest = |byte| Digest::from_bytes([byte; 32]);
        let mut names = Names::new("tiny".into());
        for (name, byte) in [("a", 1), ("b", 2)] {
            names.add(name, digest(byte));
            names.point(name, digest(byte));
        }
        let snapshot = Snapshot {
            running_adapters: BTreeMap::from([(digest(1), 2)]),
            waiting_adapters: BTreeMap::from([(digest(2), 1)]),
            ..Snapshot::default()
        };
        let text = text(&names, &snapshot, &Limits::default(), 1_789_828_498.5);
        let series: Vec<&str> = text.lines().filter(|line| line.starts_with("vllm:lora_requests_info{")).collect();
        assert_eq!(
            series,
            ["vllm:lora_requests_info{max_lora=\"8\",running_lora_adapters=\"a,a@010101010101\",\
              waiting_lora_adapters=\"b,b@020202020202\"} 1789828498.5"]
        );
        assert!(text.contains("\nvllm:num_requests_waiting 0\n"));
    }
}
