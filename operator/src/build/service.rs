//! The Services of engine and gateway.

use k8s_openapi::api::core::v1::{Service, ServicePort, ServiceSpec};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kube::ResourceExt;
use lorafleet_crds::{GatewayServiceType, ServingPool, names};

use super::{ENGINE_PORT, GATEWAY_PORT, metadata, selector_labels};

/// Headless: the gateway picks the pod itself, and needs their addresses.
pub(super) fn engine(pool: &ServingPool) -> Service {
    Service {
        metadata: metadata(pool, names::engine(&pool.name_any()), names::ENGINE_COMPONENT),
        spec: Some(ServiceSpec {
            type_: Some("ClusterIP".to_owned()),
            cluster_ip: Some("None".to_owned()),
            selector: Some(selector_labels(pool, names::ENGINE_COMPONENT)),
            ports: Some(vec![port("http", ENGINE_PORT, ENGINE_PORT)]),
            ..ServiceSpec::default()
        }),
        status: None,
    }
}

pub(super) fn gateway(pool: &ServingPool) -> Service {
    let type_ = match pool.spec.gateway.service_type {
        GatewayServiceType::ClusterIP => "ClusterIP",
        GatewayServiceType::NodePort => "NodePort",
        GatewayServiceType::LoadBalancer => "LoadBalancer",
    };
    Service {
        metadata: metadata(pool, names::gateway(&pool.name_any()), names::GATEWAY_COMPONENT),
        spec: Some(ServiceSpec {
            type_: Some(type_.to_owned()),
            selector: Some(selector_labels(pool, names::GATEWAY_COMPONENT)),
            // Not the port of the metrics, which asks for no key: who scrapes them finds the pods.
            ports: Some(vec![port("http", 80, GATEWAY_PORT)]),
            ..ServiceSpec::default()
        }),
        status: None,
    }
}

fn port(name: &str, port: i32, target: i32) -> ServicePort {
    let target = if port == target { IntOrString::Int(target) } else { IntOrString::String(name.to_owned()) };
    ServicePort {
        name: Some(name.to_owned()),
        port,
        protocol: Some("TCP".to_owned()),
        target_port: Some(target),
        ..ServicePort::default()
    }
}
