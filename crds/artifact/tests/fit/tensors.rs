//! Tensors: each kind of fault in several places, and what may lie beside the pairs.

use lorafleet_artifact::{Reason, Verified};
use serde_json::{Value, json};

use crate::support::{Files, Tensor, base, floats, open_policy, tensors_of, write, write_with};

fn check_tensors(change: impl FnOnce(&mut Vec<Tensor>), reason: Reason, message: &str) {
    let mut files = Files::of_case("plain-r8-qv");
    let mut tensors = tensors_of(&files.weights);
    change(&mut tensors);
    files.weights = write(&tensors);
    let refusal = files.verify(&base("base"), &open_policy()).expect_err(message);
    assert_eq!(refusal.reason, reason, "{message}: {refusal}");
    assert!(refusal.message.contains(message), "'{message}' is not in {refusal}");
}

#[test]
fn tensors_that_do_not_fit() {
    use Reason::{Malformed, ModuleUnknown, NoEffect, ShapeMismatch, UnsupportedFeature};
    fn extra(key: &'static str, shape: &'static [u64]) -> impl FnOnce(&mut Vec<Tensor>) {
        move |tensors| {
            let bytes = floats(shape.iter().product::<u64>() as usize, 1.0);
            tensors.push((format!("base_model.model.{key}"), "F32", shape.to_vec(), bytes));
        }
    }
    check_tensors(extra("model.layers.2.self_attn.q_proj.lora_A.weight", &[8, 64]), ModuleUnknown, "layers.2");
    check_tensors(extra("model.layers.00.self_attn.q_proj.lora_A.weight", &[8, 64]), ModuleUnknown, "layers.00");
    check_tensors(extra("model.layers.-1.self_attn.q_proj.lora_A.weight", &[8, 64]), ModuleUnknown, "layers.-1");
    check_tensors(extra("model.layers.0.mlp.q_proj.lora_A.weight", &[8, 64]), ModuleUnknown, "mlp.q_proj");
    check_tensors(extra("model.layers.0.self_attn.q_proj.lora_C.weight", &[8, 64]), ModuleUnknown, "lora_C");
    check_tensors(extra("model.layers.0.self_attn.q_proj.lora_A.default.weight", &[8, 64]), ModuleUnknown, "default");
    check_tensors(extra("score.weight", &[2, 64]), ModuleUnknown, "score");
    check_tensors(extra("model.layers.0.self_attn.rotary_emb.inv_freq", &[8]), ModuleUnknown, "inv_freq");
    check_tensors(extra("model.layers.0.mlp.up_proj.lora_A.weight", &[8, 64]), Malformed, "no partner");
    check_tensors(extra("model.layers.0.self_attn.q_proj.lora_B.bias", &[64]), UnsupportedFeature, "bias");
    check_tensors(extra("model.layers.0.self_attn.q_proj.bias", &[64]), UnsupportedFeature, "bias");
    check_tensors(extra("model.layers.0.self_attn.q_proj.lora_magnitude_vector", &[64]), UnsupportedFeature, "DoRA");
    check_tensors(extra("model.embed_tokens.lora_embedding_A", &[8, 258]), UnsupportedFeature, "embedding");
    check_tensors(extra("model.embed_tokens.weight", &[259, 64]), ShapeMismatch, "[258, 64]");
    check_tensors(extra("lm_head.base_layer.weight", &[258, 65]), ShapeMismatch, "[258, 65]");
    check_tensors(extra("model.norm.weight", &[63]), ShapeMismatch, "[63]");
    check_tensors(
        |tensors| {
            extra("model.norm.weight", &[64])(tensors);
            extra("model.norm.base_layer.weight", &[64])(tensors);
        },
        Malformed,
        "second copy",
    );
    check_tensors(|tensors| tensors[0].0 = tensors[0].0.replace("base_model.model.", ""), ModuleUnknown, "start with");
    check_tensors(Vec::clear, ModuleUnknown, "none of the 0 tensors");
    check_tensors(|tensors| tensors.retain(|tensor| !tensor.0.contains("layers.1")), Malformed, "layers.1");
    for at in 0..8 {
        check_tensors(|tensors| drop(tensors.remove(at)), Malformed, "no partner");
        check_tensors(|tensors| tensors[at].2.reverse(), ShapeMismatch, "expected");
        check_tensors(|tensors| tensors[at].2.push(1), ShapeMismatch, "expected");
        check_tensors(|tensors| tensors[at].1 = "I32", UnsupportedFeature, "I32");
        check_tensors(|tensors| tensors[at].1 = "F8_E9", UnsupportedFeature, "F8_E9");
        let not_numbers = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::from_bits(0x7fa0_0001)];
        for value in not_numbers {
            let put =
                |tensors: &mut Vec<Tensor>| tensors[at].3[4 * (7 + at)..][..4].copy_from_slice(&value.to_le_bytes());
            check_tensors(put, Malformed, "NaN or an infinity");
        }
    }
    let zero = |part: &'static str| {
        move |tensors: &mut Vec<Tensor>| {
            tensors.iter_mut().filter(|tensor| tensor.0.contains(part)).for_each(|tensor| tensor.3.fill(0));
        }
    };
    check_tensors(zero("lora_B"), NoEffect, "4 modules");
    check_tensors(zero("lora_A"), NoEffect, "4 modules");
    // Negative zeros are zeros.
    let negative = |tensors: &mut Vec<Tensor>| {
        tensors
            .iter_mut()
            .filter(|tensor| tensor.0.contains("lora_B"))
            .for_each(|tensor| tensor.3 = floats(tensor.3.len() / 4, -0.0));
    };
    check_tensors(negative, NoEffect, "4 modules");
}

#[test]
fn one_module_with_effect_is_enough() {
    let mut files = Files::of_case("plain-r8-qv");
    let mut tensors = tensors_of(&files.weights);
    tensors
        .iter_mut()
        .filter(|tensor| !tensor.0.contains("layers.1.self_attn.v_proj"))
        .for_each(|tensor| tensor.3.fill(0));
    files.weights = write(&tensors);
    files.verify(&base("base"), &open_policy()).unwrap();
}

#[test]
fn halves_are_scanned_too() {
    for (dtype, infinity) in [("F16", 0x7c00_u16), ("BF16", 0x7f80)] {
        let mut files = Files::of_case("plain-r8-qv");
        let mut tensors = tensors_of(&files.weights);
        for tensor in &mut tensors {
            (tensor.1, tensor.3) = (dtype, [0x00, 0x3c].repeat(tensor.3.len() / 4));
        }
        files.weights = write(&tensors);
        files.verify(&base("base"), &open_policy()).unwrap();
        tensors[3].3[10..12].copy_from_slice(&(infinity | 0x8001).to_le_bytes());
        files.weights = write(&tensors);
        let refusal = files.verify(&base("base"), &open_policy()).unwrap_err();
        assert_eq!(refusal.reason, Reason::Malformed);
        let header =
            lorafleet_artifact::Safetensors::parse(&files.weights, files.weights.len() as u64, &Default::default());
        let header = header.unwrap();
        let at = header.data_start + header.tensor(&tensors[3].0).unwrap().range.start + 10;
        assert!(refusal.message.ends_with(&format!(" at byte {at} of the file")), "{refusal}");
    }
}

/// The weights of a plain adapter with all tensors stored as F64, and these bits in front of the first one.
fn in_doubles(first: &[u64]) -> Files {
    let mut files = Files::of_case("plain-r8-qv");
    let mut tensors = tensors_of(&files.weights);
    for tensor in &mut tensors {
        let values = tensor.3.chunks_exact(4).map(|value| f64::from(f32::from_le_bytes(value.try_into().unwrap())));
        (tensor.1, tensor.3) = ("F64", values.flat_map(f64::to_le_bytes).collect());
    }
    let bytes: Vec<u8> = first.iter().flat_map(|bits| bits.to_le_bytes()).collect();
    tensors[0].3[..bytes.len()].copy_from_slice(&bytes);
    files.weights = write(&tensors);
    files
}

/// PEFT copies what is stored as F64 into parameters of single precision. What becomes infinite there would make every answer NaN.
#[test]
fn doubles_become_what_peft_makes_of_them() {
    let golden: Vec<Value> = serde_json::from_str(include_str!("../goldens/peft_doubles.json")).unwrap();
    let bits = |row: &Value, field: &str| u64::from_str_radix(row[field].as_str().unwrap(), 16).unwrap();
    let rows = golden.iter().map(|row| (bits(row, "double"), f32::from_bits(bits(row, "single") as u32)));
    let (finite, infinite): (Vec<_>, Vec<_>) = rows.partition(|(_, single)| single.is_finite());
    assert!(finite.len() > 10 && infinite.len() > 3);
    for (double, _) in infinite {
        let refusal = in_doubles(&[double]).verify(&base("base"), &open_policy()).unwrap_err();
        assert_eq!(refusal.reason, Reason::Malformed);
        assert!(refusal.message.contains("holds no number of single precision at byte "), "{refusal}");
    }
    let (doubles, singles): (Vec<u64>, Vec<f32>) = finite.into_iter().unzip();
    let files = in_doubles(&doubles);
    let Verified { header, mut fitted, .. } = files.verify(&base("base"), &open_policy()).unwrap();
    let mut data = files.weights[header.data_start as usize..].to_vec();
    fitted.round_doubles(&mut data);
    // What was exact is as it was before.
    let before = Files::of_case("plain-r8-qv");
    let plain = before.verify(&base("base"), &open_policy()).unwrap();
    let first = &tensors_of(&files.weights)[0].0;
    for (found, expected) in fitted.modules.iter().zip(&plain.fitted.modules) {
        for (found, expected) in [(&found.a, &expected.a), (&found.b, &expected.b)] {
            assert!(!found.double && (found.dtype, found.rows) == (expected.dtype, expected.rows));
            let found_bytes = &data[found.range.start as usize..found.range.end as usize];
            let start = plain.header.data_start;
            let expected =
                &before.weights[(start + expected.range.start) as usize..(start + expected.range.end) as usize];
            let known = if found.name == *first { singles.len() } else { 0 };
            let bits: Vec<u8> = singles[..known].iter().flat_map(|single| single.to_le_bytes()).collect();
            assert_eq!(found_bytes, [&bits, &expected[4 * known..]].concat(), "{}", found.name);
        }
    }
    // A tensor of values that are all too small for single precision is all zeros.
    let mut tensors = tensors_of(&files.weights);
    for tensor in tensors.iter_mut().filter(|tensor| tensor.0.contains("lora_B")) {
        tensor.3 = 1e-50_f64.to_le_bytes().repeat(tensor.3.len() / 8);
    }
    let weights = write(&tensors);
    let refusal = Files { weights, ..files }.verify(&base("base"), &open_policy()).unwrap_err();
    assert_eq!(refusal.reason, Reason::NoEffect);
}

#[test]
fn a_copy_of_each_of_the_bases_tensors_has_its_place() {
    let base = base("base");
    for name in base.tensor_names() {
        let shape = base.tensor_shape(&name).unwrap();
        let spellings = [name.clone(), name.replace(".weight", ".base_layer.weight")];
        for spelling in spellings {
            let mut files = Files::of_case("plain-r8-qv");
            let mut tensors = tensors_of(&files.weights);
            let bytes = floats(shape.iter().product::<u64>() as usize, 1.0);
            tensors.push((format!("base_model.model.{spelling}"), "F32", shape.clone(), bytes));
            files.weights = write(&tensors);
            let verified = files.verify(&base, &open_policy()).unwrap();
            assert_eq!(verified.fitted.base_copies[0].base_name, name);
        }
    }
}

#[test]
fn metadata_may_name_the_base() {
    let digest = "sha256:".to_owned() + &"ab".repeat(32);
    let mut files = Files::of_case("plain-r8-qv");
    let tensors = tensors_of(&files.weights);
    let mut policy = lorafleet_artifact::Policy { identities: vec![digest.parse().unwrap()], ..Default::default() };
    let check =
        |files: &Files, policy: &_| files.verify(&base("base"), policy).map(drop).map_err(|refusal| refusal.reason);
    assert_eq!(check(&files, &policy), Err(Reason::BaseUnknown));
    files.weights = write_with(&tensors, json!({"lorafleet.base_digest": digest}));
    assert_eq!(check(&files, &policy), Ok(()));
    policy.identities = vec![lorafleet_artifact::Digest::from_bytes([1; 32])];
    assert_eq!(check(&files, &policy), Err(Reason::BaseMismatch));
    files.weights = write_with(&tensors, json!({"lorafleet.base_digest": "abc"}));
    assert_eq!(check(&files, &policy), Err(Reason::Malformed));
}
