{{ config(materialized='incremental', unique_key='customer') }}
SELECT
  o.customer,
  count(*) AS orders,
  sum(o.total) AS total,
  max(o.placed) AS last_placed
FROM {{ ref('shop.orders', key='customer') }} AS o
WHERE o.customer IS NOT NULL
GROUP BY o.customer
