//! Somebody's own object has the name that one of a pool's would have: it is left as it is, and the pool says so.
#![allow(clippy::unwrap_used)]

#[test]
#[ignore = "needs a cluster: cargo xtask test"]
fn on_a_cluster_what_is_not_the_pools_is_left_alone() {
    let world = crate::world();
    let space = world.namespace("foreign").unwrap();
    let own = "apiVersion: v1
kind: Service
metadata: {name: chat-gateway}
spec:
  selector: {app: shop}
  ports: [{port: 80}]
";
    space.apply(own).unwrap();
    space.apply(&space.demo("base").unwrap()).unwrap();
    space.apply(&space.demo("pool").unwrap()).unwrap();
    let words = ["Service/chat-gateway", "not this pool's"];
    space.says("servingpool", "chat", "Ready=False ApplyFailed", &words).unwrap();
    let found = space.get("service", "chat-gateway").unwrap();
    assert_eq!(found["spec"]["selector"], serde_json::json!({ "app": "shop" }));

    space.kubectl.output(["delete", "service", "chat-gateway"]).unwrap();
    space.condition("servingpool", "chat", "Ready", "True").unwrap();
    space.answer(&space.gateway("chat").unwrap(), &["smollm2"]).unwrap();
}
